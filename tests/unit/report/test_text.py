"""Numbers read the same in all four renderings."""

from __future__ import annotations

import math

import pytest

from specverify.report.text import at_most, bytes_, clean, duration, measurement, number, power, rate


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"), (1234567, "1,234,567"), (0.0, "0"), (0.7341, "0.734"), (12.0, "12"), (1234.56, "1,234.6"),
        (2.2e-16, "2.2e-16"), (1.0e-3, "0.001"), (3.4e9, "3.4e+09"), (-0.5, "-0.5"), (math.nan, "not a number"),
        (math.inf, "infinite"), (-math.inf, "-infinite"), (None, "—"), ("a\x00", "a\ufffd"),
    ],
)  # fmt: skip
def test_number(value: float | str | None, said: str) -> None:
    """Counts keep every digit, measurements three or four."""
    assert number(value) == said


@pytest.mark.parametrize(("value", "said"), [(0.37, "0.37"), (1.0, "1"), (0.004, "4.0e-03"), (0.0, "0"), (None, "—")])
def test_rate(value: float | None, said: str) -> None:
    """A probability."""
    assert rate(value) == said


def test_units() -> None:
    """The name of a figure tells its unit."""
    assert measurement("decode_ms", 3.21) == "3.21 ms"
    assert measurement("target_tokens_per_s", 41.0) == "41 tokens/s"
    assert measurement("peak_memory_bytes", 5_368_709_120) == "5 GiB"
    assert measurement("acceptance_rate", 0.5) == "0.5"
    assert measurement("loading_s", math.inf) == "infinite"
    assert measurement("note_s", "text") == "text"
    assert bytes_(512) == "512 B"
    assert power(math.inf) == "infinite"
    assert power(7.30) == "10^7.3"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0123, "12.3 ms"), (59.94, "59.9 s"), (61, "1 min 01 s"), (3_720, "1 h 02 min"), (math.nan, "not a number")],
)
def test_duration(seconds: float, said: str) -> None:
    """Times as a person says them."""
    assert duration(seconds) == said


def test_clean() -> None:
    """Control and direction characters are replaced, long text is cut with the rest counted."""
    assert clean("a\x1b\u202e\ud800\x85b\n\t") == "a\ufffd\ufffd\ufffd\ufffdb  "
    assert clean("a\r\nb\u2028c\t", lines=True) == "a\ufffd\nb\ufffdc\t"
    assert clean("x" * 12, most=10) == "xxxxxxxxxx… (2 more characters)"
    assert at_most("a\nb   c", 4) == "a b…"
