"""The kill matrix as text: for a terminal, and as the document that lists every fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.faults import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.kill_matrix import Cell, KillMatrix

__all__ = ["render_faults", "sentence", "table"]

_ABOUT = """# Planted faults

Written by `specverify faults --markdown`.

A fault changes one part of the reference decoder, or what an engine makes of its answers. Each stands for a class of bugs
that were reported of real engines, and names checks that must fail on it. `specverify faults` plants them all in two models
of 24 ids and asks every check of correctness; `specverify certify --fault NAME` plants one in a real pair."""

_MATRIX = """## Kill matrix

Samples after which a check failed: exact laws, texts, requests or tokens. For `lossless` they are the tokens at which the
e-process was proof, where it was. An empty cell let the fault pass, most often because the fault does not concern it."""


def table(matrix: KillMatrix) -> str:
    """A line a fault; a number is the samples after which the check failed, a dot that it passed."""
    wide = max(len(fault.name) for fault in matrix.faults) + 2
    units = _units(matrix)
    lines = [
        " " * wide + "  ".join(matrix.check_ids),
        " " * wide + "  ".join(f"{units[name]:>{len(name)}}" for name in matrix.check_ids),
    ]
    for fault in matrix.faults:
        cells = (f"{_shown(matrix.cell(fault.name, name)) or '·':>{len(name)}}" for name in matrix.check_ids)
        lines.append(f"{fault.name:<{wide}}{'  '.join(cells)}")
    return "\n".join(lines)


def sentence(matrix: KillMatrix) -> str:
    """How many were caught, and what is missing."""
    caught = len(matrix.faults) - len(matrix.empty_rows)
    said = f"{caught} of {len(matrix.faults)} faults caught by {', '.join(matrix.check_ids)}"
    if matrix.empty_rows:
        said += f"; by none of them: {', '.join(matrix.empty_rows)}"
    if matrix.missed:
        said += f"; MISSED: {', '.join(f'{cell.fault} by {cell.check_id}' for cell in matrix.missed)}"
    return said


def render_faults(matrix: KillMatrix) -> str:
    """What each fault stands for, by the part that is wrong, and the matrix."""
    parts = [_ABOUT]
    for family, faults in FAMILIES.items():
        rows = [
            (f"`{fault.name}`", fault.stands_for, ", ".join(fault.caught_by))
            for fault in faults
            if fault in matrix.faults
        ]
        if rows:
            parts += [f"## {family.capitalize()}", _markdown(("fault", "stands for", "caught by"), rows)]
    units = _units(matrix)
    head = ("", *(f"{name} ({units[name]})" if units[name] else name for name in matrix.check_ids))
    kills = [
        (f"`{fault.name}`", *(_shown(matrix.cell(fault.name, name)) for name in matrix.check_ids))
        for fault in matrix.faults
    ]
    return "\n\n".join((*parts, _MATRIX, _markdown(head, kills), f"{sentence(matrix)}.")) + "\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _units(matrix: KillMatrix) -> dict[str, str]:
    """What the samples of each check are."""
    counted = {cell.check_id: cell.sample_unit for cell in reversed(matrix.cells) if cell.killed and cell.num_samples}
    return {name: counted.get(name, "") for name in matrix.check_ids}


def _shown(cell: Cell) -> str:
    """The samples of a kill, or nothing."""
    if not cell.killed:
        return ""
    return f"{cell.crossed_at_tokens or cell.num_samples:,}" if cell.num_samples else "broke"
