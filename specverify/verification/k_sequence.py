"""k-sequence selection: independent siblings share one threshold, chosen so that exactly the target's mass is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification.tree import Walk, normalised, tree_parents

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.verification import Proposal, Verification

__all__ = ["division_factor", "k_sequence"]

_BISECTIONS = 60


def k_sequence(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Accept the first of k independent siblings with min(1, p / (r q)), the same r for all [SpecTr2023, Alg. 2].

    r solves 1 - (1 - β)^k = r β with β(r) = Σ min(q, p / r). If none is accepted, the token comes from
    p - min(q, p / r) (1 - (1 - β)^k) / β.
    """
    parents, walk = tree_parents(proposal), Walk.start(target_probs)
    factor, left = torch.ones_like(target_probs[:, 0, 0]), target_probs[:, 0]
    for place in range(proposal.token_ids.shape[1]):
        tried = proposal.drafted[:, place] & (parents[:, place] == walk.node)
        first = tried & ~walk.rejected
        siblings = ((parents == walk.node[:, None]) & proposal.drafted).sum(-1)
        q, x = proposal.draft_probs[:, place], proposal.token_ids[:, place : place + 1]
        r, rest = _shared_threshold(walk.law, q, siblings)
        factor, left = torch.where(first, r, factor), torch.where(first[:, None], rest, left)
        p_x, q_x = (law.gather(-1, x)[:, 0] for law in (target_probs[torch.arange(len(x)), walk.node + 1], q))
        ratio = torch.where(q_x > 0, p_x / (factor * q_x), 0).clamp(max=1)
        at = torch.tensor([place], device=x.device)
        accepted = tried & choices.accept(torch.where(tried, ratio, 0)[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        walk.step(place, tried, accepted, target_probs, left)
    return walk.end(proposal, choices)


def _shared_threshold(
    p: Float[Tensor, "batch vocab"], q: Float[Tensor, "batch vocab"], k: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch vocab"]]:
    """r, and the law of the token if all k siblings are rejected."""
    r = division_factor(p, q, k)
    accepted = torch.minimum(q, p / r[:, None])
    beta = accepted.sum(-1, keepdim=True)
    share = torch.where(beta > 0, (1 - (1 - beta) ** k[:, None]) / beta.clamp(min=torch.finfo(p.dtype).tiny), 0)
    return r, normalised((p - accepted * share).clamp(min=0), p)


def division_factor(
    p: Float[Tensor, "batch vocab"], q: Float[Tensor, "batch vocab"], k: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """The root r in [1, k] of 1 - (1 - β)^k = r β, by bisection; the upper end, at which the residual is no less than 0."""
    low, high = torch.ones_like(p[:, 0]), k.clamp(min=1).to(p.dtype)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[:, None]).sum(-1)
        above = 1 - (1 - beta) ** k > middle * beta
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high
