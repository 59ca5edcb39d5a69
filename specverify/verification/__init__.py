"""The acceptance rules. A rule is a function `(proposal, target_probs, choices) -> Verification`, read top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Proposal", "Rule", "Verification", "draft_row_at", "leading", "row_at"]


@dataclass(frozen=True)
class Proposal:
    """Drafted ids, and the law that each was really drawn from: a chain, or a tree.

    Right-padded: row b proposes its first `num_draft_tokens[b]` ids, which may be 0. `draft_probs` past that are zero.

    In a tree the ids are its nodes, each after its parent, siblings in the order in which they are tried. Siblings have
    the same `draft_probs`: the law after their parent, before any sibling was drawn (a rule that knows them to be drawn
    without replacement removes the earlier ones itself). `target_probs` of a rule has row 0 after the context and row
    i + 1 after node i, for a chain and a tree alike.
    """

    token_ids: Int[Tensor, "batch k"]
    num_draft_tokens: Int[Tensor, " batch"]
    draft_probs: Float[Tensor, "batch k vocab"]
    parents: Int[Tensor, "batch k"] | None = None
    """The place of each node's parent, -1 for a child of the context; None for a chain."""

    @property
    def drafted(self) -> Bool[Tensor, "batch k"]:
        """Which of the padded places hold a draft."""
        places = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return places < self.num_draft_tokens[:, None]

    @staticmethod
    def point_masses(
        token_ids: Int[Tensor, "batch k"], num_draft_tokens: Int[Tensor, " batch"], vocab_size: int
    ) -> Proposal:
        """A deterministic draft: each id's law is a point mass on it."""
        laws = torch.nn.functional.one_hot(token_ids, vocab_size).double()
        proposal = Proposal(token_ids, num_draft_tokens, laws)
        laws[~proposal.drafted] = 0
        return proposal


@dataclass(frozen=True)
class Verification:
    """How many drafted tokens each row accepts, and the one token that the target adds after them."""

    num_accepted_tokens: Int[Tensor, " batch"]
    next_token_ids: Int[Tensor, " batch"]
    """The residual token after a rejection, the bonus token after none."""
    accepted_nodes: Int[Tensor, "batch depth"] | None = None
    """Places of the accepted nodes of a tree in their order, -1 past `num_accepted_tokens`; None: the first of a chain."""


Rule = Callable[[Proposal, "Float[Tensor, 'batch k_plus_1 vocab']", Choices], Verification]


def leading(flags: Bool[Tensor, "batch k"]) -> Int[Tensor, " batch"]:
    """How many flags are true before the first that is not."""
    return flags.long().cumprod(-1).sum(-1)


def row_at(probs: Float[Tensor, "batch n vocab"], place: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
    """Each sequence's row at its own place."""
    if probs.shape[1] == 1:
        return probs[:, 0]
    first = torch.arange(len(probs), device=probs.device) * probs.shape[1]
    return probs.flatten(0, 1).index_select(0, first + place)


def draft_row_at(proposal: Proposal, place: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
    """Each sequence's draft law at its own place; zeros after its last draft, since nothing was drafted for the bonus."""
    laws = proposal.draft_probs
    if not laws.shape[1]:
        return laws.new_zeros(len(laws), laws.shape[2])
    there = place < proposal.num_draft_tokens
    return torch.where(there[:, None], row_at(laws, place.clamp(max=laws.shape[1] - 1)), 0)
