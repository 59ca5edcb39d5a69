"""Right rules that look at a wrong row: of the block, or of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specverify.faults.cache import PassingSession, on_target
from specverify.faults.draft import Proposing
from specverify.faults.fault import Fault
from specverify.faults.rule import ChainParts, rule, told

if TYPE_CHECKING:
    from torch import Tensor

    from specverify.context import Context
    from specverify.drafting import Drafting
    from specverify.verification import Proposal

__all__ = ["ROW_FAULTS"]


def _shifted(proposal: Proposal) -> Proposal:
    """Each draft is told the law of the one before it."""
    return replace(proposal, draft_probs=proposal.draft_probs.roll(1, 1))


def _law_of_neighbour(inner: Drafting, context: Context, max_tokens: Tensor) -> Proposal:
    """Each sequence reports the draft's laws of the one before it in the batch."""
    proposal = inner.propose(context, max_tokens)
    rolled = proposal.draft_probs.roll(1, 0)
    return replace(proposal, draft_probs=torch.where(proposal.drafted[..., None], rolled, 0))


class _RaggedRowsOfNeighbour(PassingSession):
    """A sequence with a shorter block than the longest of its batch is handed the rows of the one before it."""

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        logits = super().append(token_ids, num_tokens, parents)
        short = num_tokens < num_tokens.max()
        return torch.where(short[:, None, None], logits.roll(1, 0), logits)


class _LastRowFromPadding(PassingSession):
    """The last row of every block is taken from the end of the padded one."""

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        logits = super().append(token_ids, num_tokens, parents)
        shifted = logits.clone()
        shifted[torch.arange(len(logits), device=logits.device), num_tokens - 1] = logits[:, -1]
        return shifted


ROW_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="residual-wrong-row",
        stands_for="the residual is taken from the row after the rejected token",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual_row=lambda place: place + 1)),
    ),
    Fault(
        name="bonus-wrong-row",
        stands_for="the bonus is drawn from the row of the last draft, one too early",
        caught_by=("exactness", "greedy"),
        apply=rule(ChainParts(bonus_row=lambda place: place - 1)),
    ),
    Fault(
        name="bonus-from-padding",
        stands_for="a sequence that drafted less than its batch takes its bonus from the last, padded row",
        caught_by=("greedy",),
        apply=on_target(lambda session, _: _LastRowFromPadding(session)),
    ),
    Fault(
        name="ragged-rows-of-neighbour",
        stands_for="offsets into a flat batch assume equal numbers of drafts: a shorter sequence reads its neighbour's rows",
        caught_by=("greedy",),
        apply=on_target(lambda session, _: _RaggedRowsOfNeighbour(session)),
    ),
    Fault(
        name="draft-law-shifted",
        stands_for="draft probabilities are stored one row off: each draft is held against the law of the one before it",
        caught_by=("exactness", "lossless"),
        apply=rule(told(_shifted)),
    ),
    Fault(
        name="draft-law-of-neighbour",
        stands_for="draft probabilities are paired with another request after a reorder of the batch",
        caught_by=("reproducibility", "lossless"),
        apply=lambda decoder: replace(decoder, drafter=Proposing(decoder.drafter, _law_of_neighbour)),
    ),
)
"""The row of another place or of another sequence."""
