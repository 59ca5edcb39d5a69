"""A matrix as one table: for the terminal, and as Markdown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specverify.records import Verdict
from specverify.report.markdown import MOST_CHARACTERS, escape
from specverify.report.text import LABELS, clean, number, power

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.matrix import MatrixRow

__all__ = ["as_object", "render_matrix", "sentence", "table"]

_MOST_REASONS = 20
_HEAD = ("cell", "target", "draft", "parameters", "tokens", "verdict", "acceptance", "speed-up", "evidence", "e-BH")


def table(rows: Sequence[MatrixRow]) -> str:
    """Aligned columns."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def render_matrix(rows: Sequence[MatrixRow], false_discovery_rate: float) -> str:
    """The same as Markdown, short enough to be posted."""
    lines = [
        f"## {escape(sentence(rows, false_discovery_rate))}",
        "",
        f"| {' | '.join(_HEAD)} |",
        "|---" * len(_HEAD) + "|",
    ]
    told = ["", *(f"- {escape(reason, most=400)}" for reason in reasons(rows))]
    written = sum(len(line) + 1 for line in (*lines, *told))
    for place, row in enumerate(rows):
        line = f"| {' | '.join(escape(cell, most=80) for cell in _cells(row))} |"
        written += len(line) + 1
        if written > MOST_CHARACTERS - 200:
            lines += ["", f"{len(rows) - place} more cells are in matrix.json."]
            break
        lines.append(line)
    return "\n".join((*lines, *told)).rstrip() + "\n"


def sentence(rows: Sequence[MatrixRow], false_discovery_rate: float) -> str:
    """How the matrix ended."""
    verdicts = [row.verdict for row in rows]
    counted = ", ".join(f"{verdicts.count(each)} {LABELS[each]}" for each in LABELS if each in verdicts)
    named = sum(row.discovered for row in rows)
    return f"{len(rows)} cells: {counted}; {named} named as lossy by e-BH at a false discovery rate of {false_discovery_rate:g}"


def reasons(rows: Sequence[MatrixRow]) -> list[str]:
    """Why a cell is no PASS, or short of the policy: the first few, a line each."""
    told = [
        f"{row.cell.name}: {clean(reason)}"
        for row in rows
        for reason in (*([] if row.verdict is Verdict.PASS else [row.headline]), *row.unmet)
    ]
    more = [f"{len(told) - _MOST_REASONS} more are in matrix.json"] if len(told) > _MOST_REASONS else []
    return told[:_MOST_REASONS] + more


def as_object(rows: Sequence[MatrixRow], false_discovery_rate: float) -> dict[str, object]:
    """Plain values, for JSON; what is not finite is a string."""
    return {
        "false_discovery_rate": false_discovery_rate,
        "cells": [
            {
                "name": row.cell.name, "target": row.cell.target, "draft": row.cell.draft, "parameters": row.cell.parameters,
                "num_speculative_tokens": row.cell.num_speculative_tokens, "verdict": row.verdict, "headline": row.headline,
                "log10_e": _finite(row.log10_e), "discovered": row.discovered,
                "expected_acceptance": _finite(row.expected_acceptance), "measured_speedup": _finite(row.measured_speedup),
                "policy": list(row.unmet),
            }
            for row in rows
        ],
    }  # fmt: skip


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")


def _cells(row: MatrixRow) -> tuple[str, ...]:
    known = [None if math.isnan(each) else each for each in (row.expected_acceptance, row.measured_speedup)]
    return (
        clean(row.cell.name.partition("-")[0]),  # what the name of its folder begins with
        clean(row.cell.target),
        clean(row.cell.draft),
        clean(row.cell.parameters),
        str(row.cell.num_speculative_tokens),
        LABELS[row.verdict],
        number(known[0]),
        f"{number(known[1])}x" if known[1] is not None else number(None),
        power(row.log10_e),
        "lossy" if row.discovered else "",
    )
