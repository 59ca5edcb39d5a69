"""A benchmark's record as text."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.bench import BenchReport, Change, Comparison

__all__ = ["change_table", "comparison_table"]


def comparison_table(report: BenchReport) -> str:
    """A block a workload, a line a contender: rate, and how many times its baseline's speed."""
    environment = report.environment
    lines = [
        (
            f"{environment.cpu}, {environment.device}, {environment.num_threads} thread(s), load {report.load_per_core:.1f} a "
            f"core when it began, {report.clock} time: read the ratios, not the rates"
        )
    ]
    for (work, baseline), group in groupby(report.comparisons, key=lambda each: (each.id, each.baseline)):
        lines += ["", f"{work}, times the speed of {baseline}:", *map(_line, group)]
    figures = {name: value for name, value in report.measurements.items() if isinstance(value, float | int)}
    if figures:
        wide = max(map(len, figures))
        lines += ["", *(f"  {name:<{wide}}  {value:,.4g}" for name, value in figures.items())]
    return "\n".join([*lines, *(f"\nnot run: {reason}" for reason in report.not_run)])


def _line(each: Comparison) -> str:
    ratio = each.ratio
    bytes_read = f"  {each.gigabytes_per_s:7.1f} GB/s" if each.num_bytes else ""
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    return (
        f"  {each.name:<20}  {ratio.estimate:8.2f}x {interval:<18}  {each.units_per_s:12,.0f} {each.unit}/s{bytes_read}"
    )


def change_table(changes: Sequence[Change]) -> str:
    """A line a contender that both records have."""
    if not changes:
        return "the two records have nothing in common"
    return "\n".join(f"{change.verdict:<13} {change.id}, {change.name}: {change.text}" for change in changes)
