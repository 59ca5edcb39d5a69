"""Gumbel coupling: draft and target run the same race, so they often name the same winner, and the output is the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.verification.chain import matching

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from specverify.choices import Choices
    from specverify.verification import Proposal, Verification

__all__ = ["gumbel_coupling", "match_probability"]


def gumbel_coupling(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Run the target's own race at every position, and accept while the draft won it, too [Daliri2024, Alg. 1].

    The noise of a position is the draft's and the target's, and doesn't depend on the step. So what is emitted is what the
    target alone would emit with the same seed, bit for bit, at any temperature.
    """
    places = torch.arange(target_probs.shape[1], device=target_probs.device)
    guesses = torch.where(proposal.drafted, proposal.token_ids, -1)
    return matching(proposal, choices.race(target_probs, at=places, guesses=guesses))


def match_probability(
    target_probs: Float[Tensor, "*rows vocab"], draft_probs: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows"]:
    """How often both races have one winner: Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x) [Daliri2024, Thm. 3].

    The first term of the maximum is the larger one where p_y / q_y >= p_x / q_x. So with the ids in falling order of p / q
    both sums over y are cumulative ones, and a whole vocabulary takes one sort.
    """
    p, q = target_probs.double(), draft_probs.double()
    order = torch.where(p > 0, p / q, 0).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    from_target, from_draft = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    return torch.where((p > 0) & (q > 0), 1 / (from_target / p + from_draft.clamp(min=0) / q), 0).sum(-1)
