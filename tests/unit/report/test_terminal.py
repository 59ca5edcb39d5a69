"""The terminal: narrow, without colour, in any encoding."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from specverify.report.terminal import print_certificate

if TYPE_CHECKING:
    from specverify.records import Certificate


def printed(certificate: Certificate, *, encoding: str = "utf-8", color: bool = False) -> str:
    """What a terminal of 80 columns shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline="")
    console = Console(file=file, width=80, force_terminal=color, color_system="standard" if color else None)
    print_certificate(certificate, console, path="out/certificate.json")
    file.flush()
    return raw.getvalue().decode(encoding)


def test_narrow(certificate: Certificate) -> None:
    """No line is wider than 80 columns, no control character passes, and no colour is needed."""
    text = printed(certificate)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "✗ FAIL  Do not roll this out: lossless failed." in text
    assert "? INCONCLUSIVE" in text
    assert "– NOT RUN" in text
    assert text.rstrip().endswith("certificate: out/certificate.json")


def test_reads_as_a_failure(certificate: Certificate) -> None:
    """The claim, the numbers with their allowance, the place, and one command, in one piece."""
    text = printed(certificate)
    for line in (
        "claim       sampled tokens follow",
        "e-value     10^11.8     fails from 10^7.3",
        "p-value     3.1e-09     fails below 5.0e-08",
        "detectable  0.012 TV distance",
        "samples     20,000 tokens     seed 17",
        "seen        worst token: id 1042",
        "what to do  run specverify qualify",
        "Reproduce: specverify certify pair/ --only lossless --seed 17",
    ):
        assert line in text
    assert "first token | prompt 2" not in text
    assert "reproduce: specverify certify pair/ --only compatibility" not in text.lower()


def test_markup_is_text(certificate: Certificate) -> None:
    """Text in square brackets is no style of rich's, and no escape sequence of a prompt reaches the terminal."""
    text = printed(replace(certificate, headline="[bold]a[/nope] \x1b]0;x\x07"), color=True)
    assert "[bold]a[/nope] \ufffd]0;x\ufffd" in text
    assert "\x1b]0" not in text


def test_other_encodings(certificate: Certificate) -> None:
    """Where the signs can't be shown the words stand alone."""
    assert "\nFAIL  Do not roll this out" in printed(certificate, encoding="ascii")


def test_planted_fault(certificate: Certificate) -> None:
    """A demonstration says so after its verdict."""
    assert "Planted fault 'accept_leq': a demonstration." in printed(replace(certificate, fault="accept_leq"))
