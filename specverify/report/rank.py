"""A ranking as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specverify.rank import Choice, RankedDraft, Ranking

__all__ = ["ranking_table"]

_POSITIONS = 5


def ranking_table(ranking: Ranking) -> str:
    """A line a draft: acceptance at its first positions, memory, and the best choice at each batch size."""
    wide = max(5, *(len(draft.name) for draft in ranking.drafts))
    batches = "  ".join(f"{f'batch {batch}':<26}" for batch in ranking.batches)
    head = f"{'draft':<{wide}}  {'memory':>9}  {'accepted at 1, 2, …':<27}  {batches}".rstrip()
    return "\n".join([head, *(_line(draft, wide) for draft in ranking.drafts)])


def _line(draft: RankedDraft, wide: int) -> str:
    accepted = " ".join(f"{rate:.2f}" for rate in draft.acceptance_by_position[:_POSITIONS])
    choices = "  ".join(f"{_choice(choice):<26}" for choice in draft.choices)
    return f"{draft.name:<{wide}}  {draft.memory_bytes / 1e6:>6.1f} MB  {accepted:<27}  {choices}".rstrip()


def _choice(choice: Choice) -> str:
    if choice.loss:
        return f"a loss (best {max(choice.speedups):.2f}x)"
    return f"{choice.num_speculative_tokens}: {choice.speedup:.2f}x [{choice.low:.2f}, {choice.high:.2f}]"
