"""The table of scopes as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.scopes import SCOPES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["render_scopes"]

_ABOUT = """# How small is small enough

Written by `specverify faults --scopes`.

A rule is proved by enumerating every path of it over small tables. Too small a table hides a wrong rule: with two ids and one
draft there is no second row to be mistaken for the first, and no sibling to be counted twice. Each number is in how many of
twelve random pairs of tables (rows of fifteenths, every row another) the law of a completed block differs from the target's by
more than 1e-12. V is the number of ids, g of tokens drafted one after the other; tree rules draft two children, each with one child.

Rules are proved at V = 4, g = 3: exactly 0 in fractions (`properties/test_fractions.py`), 1e-12 in float64, 1e-6 in float32.
`accept-or-equal` shows only where a uniform is exactly 0, which has no probability: `exactness` asks there."""


def render_scopes(table: Mapping[str, tuple[int, ...]]) -> str:
    """A line a wrong rule."""
    head = ("", *(f"V={scope.vocab_size} g={scope.num_drafts}" for scope in SCOPES))
    rows = [(f"`{name}`", *(str(kills or "·") for kills in counts)) for name, counts in table.items()]
    lines = (head, ["---"] * len(head), *rows)
    return f"{_ABOUT}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
