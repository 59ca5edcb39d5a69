"""How numbers and failures read, once, so that terminal, HTML, JUnit and Markdown agree. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.records import Certificate, CheckResult, Finding, StatisticalTest

__all__ = [
    "LABELS",
    "MARKS",
    "NONE",
    "TestRow",
    "at_most",
    "clean",
    "detectable",
    "duration",
    "failure",
    "failure_rows",
    "finding",
    "measurement",
    "number",
    "planted",
    "rate",
    "samples",
    "settings",
    "test_row",
    "versus",
]

MARKS = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.INCONCLUSIVE: "?", Verdict.NOT_RUN: "–"}
"""A sign for each verdict: none is told by its colour alone."""
LABELS = {
    Verdict.PASS: "PASS",
    Verdict.FAIL: "FAIL",
    Verdict.INCONCLUSIVE: "INCONCLUSIVE",
    Verdict.NOT_RUN: "NOT RUN",
}
NONE = "—"

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, which XML forbids and terminals obey, other ends of a line, and the marks that turn the reading direction."""
_UNITS = {
    "_tokens_per_s": " tokens/s",
    "_per_s": " /s",
    "_ms": " ms",
    "_s": " s",
    "_logits": " logits",
}
_SEEN = {Verdict.FAIL: "seen"}
_WIDTH = 14
_MOST_TESTS = 5


def clean(text: str, *, most: int | None = None, lines: bool = False) -> str:
    """`text` without control characters (U+FFFD instead), cut to `most` characters with the number left out.

    It is one line, so that no name out of a file makes a line of its own, unless it is text of ours in several `lines`.
    """
    kept = _UNPRINTABLE.sub("\ufffd", text)
    if not lines:
        kept = kept.replace("\n", " ").replace("\t", " ")
    if most is None or len(kept) <= most:
        return kept
    return f"{kept[:most]}… ({len(kept) - most:,} more characters)"


def at_most(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


# ---------------------------------------------------------------------------------------------- numbers


def number(value: float | str | None) -> str:
    """Counts with thousands separators, other numbers with three or four digits."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """A probability: plain where one reads it easily, otherwise with an exponent."""
    if value is None:
        return NONE
    return f"{value:.2g}" if 0.01 <= value <= 1 else f"{value:.1e}" if value else "0"


def bytes_(value: float) -> str:
    """A size in memory."""
    size, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or not math.isfinite(size):
            break
        size, unit = size / 1024, larger
    return f"{number(round(size, 1))} {unit}"


def duration(seconds: float) -> str:
    """A time that a person waits."""
    if not math.isfinite(seconds) or seconds < 1:
        return f"{number(round(seconds * 1000, 1))} ms" if math.isfinite(seconds) else number(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def measurement(name: str, value: float | str) -> str:
    """A measured figure with the unit that its name ends in."""
    if isinstance(value, str):
        return clean(value)
    if name.endswith("_bytes"):
        return bytes_(value)
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return number(value) + (unit if math.isfinite(value) else "")


def detectable(result: CheckResult) -> str:
    """The smallest effect that the check would have seen, with its unit."""
    if result.smallest_detectable is None:
        return NONE
    return f"{number(float(result.smallest_detectable))} {clean(result.effect_unit)}".rstrip()


def samples(result: CheckResult) -> str:
    """How much was looked at."""
    return f"{result.num_samples:,} {clean(result.sample_unit)}" if result.num_samples else NONE


def settings(plan: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a plan by its name in a plan file, and its value."""
    for name, value in plan.items():
        if isinstance(value, Mapping):
            yield from settings(value, f"{prefix}{name}.")
        elif isinstance(value, (tuple, list)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or NONE
        else:
            yield f"{prefix}{name}", str(value)


# ---------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True, kw_only=True)
class TestRow:
    """A statistical test as it is printed everywhere."""

    __test__ = False

    name: str
    statistic: str
    evidence: str
    allowed: str
    samples: str
    detectable: str
    outcome: str


def test_row(test: StatisticalTest) -> TestRow:
    """The cells of a test: p-value or evidence, and what it was allowed."""
    if test.p_value is not None:
        evidence, allowed = f"p = {rate(test.p_value)}", f"fails below {rate(test.allowed)}"
    elif test.log10_e is not None:
        evidence, allowed = f"e = {power(test.log10_e)}", f"fails from {power(test.allowed)}"
    else:
        evidence, allowed = NONE, f"allowed {number(float(test.allowed))}"
    return TestRow(
        name=clean(test.name),
        statistic=number(float(test.statistic)),
        evidence=evidence,
        allowed=allowed,
        samples=number(test.num_samples),
        detectable=NONE
        if test.smallest_detectable is None
        else f"{number(float(test.smallest_detectable))} {clean(test.effect_unit)}",
        outcome="failed" if test.failed else "held",
    )


test_row.__test__ = False  # type: ignore[attr-defined]  # a test of the statistical kind


def power(log10: float) -> str:
    """10 to the `log10`."""
    return f"10^{log10:.1f}" if math.isfinite(log10) else number(log10)


# ---------------------------------------------------------------------------------------------- sentences


def versus(certificate: Certificate) -> str:
    """The pair under test, in one phrase."""
    draft = certificate.draft.name if certificate.draft else "no draft model"
    return f"{clean(certificate.target.name)} with {clean(draft)}"


def planted(certificate: Certificate) -> str:
    """The warning that a demonstration's certificate carries; empty for a real one."""
    if not certificate.fault:
        return ""
    return f"Planted fault '{clean(certificate.fault)}': a demonstration. This certificate says nothing about the pair."


def finding(seen: Finding) -> str:
    """A finding in one line, its place first."""
    return f"{clean(seen.place)}: {clean(seen.text)}" if seen.place else clean(seen.text)


def failure(result: CheckResult, *, seed: int | None = None, most_findings: int = 5, most: int | None = None) -> str:
    """How a failure reads: the claim, the numbers with their allowance, the place, one command that shows it again.

    `most` characters are told before the command, which is whole.
    """
    lines = [
        f"  {label:<{_WIDTH}}{line}" for label, line in failure_rows(result, seed=seed, most_findings=most_findings)
    ]
    head = f"{clean(result.id)} {LABELS[result.verdict]}: {clean(result.summary)}"
    told = clean("\n".join([head, "", *lines]), most=most, lines=True)
    return f"{told}\n\nReproduce: {clean(result.reproduce)}" if result.reproduce else told


def failure_rows(result: CheckResult, *, seed: int | None = None, most_findings: int = 5) -> list[tuple[str, str]]:
    """The labelled lines of a failure; the tests are those that failed, or the first where none did."""
    rows: list[tuple[str, str]] = [("claim", clean(result.claim))]
    decisive = [test for test in result.tests if test.failed] or list(result.tests[:1])
    for test in decisive[:_MOST_TESTS]:
        row = test_row(test)
        rows.append(("test", f"{row.name}, statistic {row.statistic}, n = {row.samples}"))
        if row.evidence != NONE:
            rows.append(("p-value" if test.p_value is not None else "e-value", f"{row.evidence[4:]:<11} {row.allowed}"))
    if len(decisive) > _MOST_TESTS:
        rows.append(("", f"and {len(decisive) - _MOST_TESTS:,} more tests failed"))
    if result.smallest_detectable is not None:
        rows.append(("detectable", detectable(result)))
    if result.num_samples or seed is not None:
        rows.append(("samples", samples(result) + (f"     seed {seed}" if seed is not None else "")))
    rows += [(_SEEN.get(seen.severity, "note"), finding(seen)) for seen in result.findings[:most_findings]]
    if len(result.findings) > most_findings:
        rows.append(("", f"and {len(result.findings) - most_findings:,} more findings"))
    if result.advice and result.verdict is not Verdict.PASS:
        rows.append(("what to do", clean(result.advice)))
    return rows
