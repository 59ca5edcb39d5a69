"""Comparisons and watches as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specverify.records import Verdict
from specverify.report.text import clean, measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.compare.records import Change, Comparison
    from specverify.metrics import Drift

__all__ = ["drift_verdict", "render_comparison", "render_drift"]


def render_comparison(report: Comparison) -> str:
    """The verdict, each figure on both sides, and what a rollout has to know."""
    return "\n".join(map(clean, _lines(report)))


def _lines(report: Comparison) -> Iterator[str]:
    yield f"{report.verdict}  {report.headline}"
    yield f"  old: {report.old.kind} {report.old.name}    new: {report.new.kind} {report.new.name}"
    yield ""
    yield _columns("", "old", "new", "change")
    yield _row(report.acceptance)
    for change in (*report.domains, *report.positions):
        yield _row(change, indent="  ")
    for figure in (report.tokens_per_step, report.speedup):
        if figure is not None:
            yield _row(figure)
    for name in sorted(report.old.measurements.keys() & report.new.measurements.keys()):
        yield _columns(name, *(measurement(name, side.measurements[name]) for side in (report.old, report.new)))
    yield ""
    for finding in report.findings:
        yield f"  {finding.place}: {finding.text}"
    yield f"  allowed fall {report.allowed_fall:g}, confidence {report.confidence:.0%}{'' if report.acceptance.paired else ', not paired by prompt'}"


def _row(change: Change, *, indent: str = "") -> str:
    interval = change.difference
    ends = f" [{interval.low:+.3f}, {interval.high:+.3f}]" if math.isfinite(interval.low) else ""
    fell = "  FELL" if change.fell else ""
    told = f"{interval.estimate:+.3f}{ends}{fell}"
    return _columns(indent + change.name, f"{change.old:.3f}", f"{change.new:.3f}", told)


def _columns(name: str, old: str, new: str, change: str = "") -> str:
    return f"  {name:<28}{old:>10}{new:>10}  {change}".rstrip()


def drift_verdict(seen: Drift) -> Verdict:
    """FAIL is an alarm; a watch in which nothing was drafted says nothing."""
    if seen.alarm_at is not None:
        return Verdict.FAIL
    return Verdict.PASS if seen.observations else Verdict.INCONCLUSIVE


def render_drift(seen: Drift, *, quiet: bool) -> str:
    """What was seen, with the false-alarm rate that was promised."""
    verdict = drift_verdict(seen)
    if seen.alarm_at is not None:
        head = f"acceptance fell below {seen.baseline:.3f}: alarm at observation {seen.alarm_at}, mean {seen.mean:.3f}"
    elif seen.observations:
        head = f"no alarm in {len(seen.observations)} observations, mean {seen.mean:.3f}, baseline {seen.baseline:.3f}"
    else:
        head = "nothing was drafted while we watched"
    if quiet:
        return f"{verdict}  {head}"
    return (
        f"{verdict}  {head}\n"
        f"  evidence {seen.evidence:.3g}, alarm from {seen.threshold:.3g}: a false alarm in at most {seen.false_alarm_rate:g} "
        f"of such watches ({seen.most_observations} observations)\n"
        f"  {seen.skipped} intervals skipped (nothing drafted, or no answer), {seen.elapsed_s:.0f} s"
    )
