"""k-sequence selection: independent siblings share one threshold, chosen so that exactly the target's mass is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification.tree import Walk, normalised, tree_parents

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.verification import Proposal, Verification

__all__ = ["division_factor", "k_sequence"]

Divide = Callable[["Float[Tensor, 'rows vocab']", "Float[Tensor, 'rows vocab']", "Int[Tensor, ' rows']"], "Tensor"]
"""From p, q and the number of siblings to r."""

_MOST_STEPS = 100
"""Halving [1, k] down to 1e-15 takes 50 and a few; Newton's steps save most of them."""


def k_sequence(
    proposal: Proposal,
    target_probs: Float[Tensor, "batch k_plus_1 vocab"],
    choices: Choices,
    *,
    divide: Divide | None = None,
) -> Verification:
    """Accept the first of k independent siblings with min(1, p / (r q)), the same r for all [SpecTr2023, Alg. 2].

    r is `division_factor` unless said otherwise; any r that is not below it is lossless, too, and accepts less. If none is
    accepted, the token comes from p - min(q, p / r) (1 - (1 - β)^k) / β, where β = Σ min(q, p / r).
    """
    divide = divide or division_factor
    parents, walk = tree_parents(proposal), Walk.start(target_probs)
    factor, left = torch.ones_like(target_probs[:, 0, 0]), target_probs[:, 0].clone()
    for place in range(proposal.token_ids.shape[1]):
        tried = proposal.drafted[:, place] & (parents[:, place] == walk.node)
        first = (tried & ~walk.rejected).nonzero()[:, 0]
        siblings = ((parents[first] == walk.node[first, None]) & proposal.drafted[first]).sum(-1)
        q, x = proposal.draft_probs[:, place], proposal.token_ids[:, place : place + 1]
        factor[first], left[first] = _shared_threshold(walk.law[first], q[first], siblings, divide)
        p_x, q_x = (law.gather(-1, x)[:, 0] for law in (target_probs[torch.arange(len(x)), walk.node + 1], q))
        ratio = torch.where(q_x > 0, p_x / (factor * q_x), 0).clamp(max=1)
        at = torch.tensor([place], device=x.device)
        accepted = tried & choices.accept(torch.where(tried, ratio, 0)[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        walk.step(place, tried, accepted, target_probs, left)
    return walk.end(proposal, choices)


def _shared_threshold(
    p: Float[Tensor, "batch vocab"], q: Float[Tensor, "batch vocab"], k: Int[Tensor, " batch"], divide: Divide
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch vocab"]]:
    """r, and the law of the token if all k siblings are rejected."""
    r = divide(p, q, k)
    accepted = torch.minimum(q, p / r[:, None])
    beta = accepted.sum(-1, keepdim=True)
    share = torch.where(beta > 0, -torch.expm1(k[:, None] * torch.log1p(-beta.clamp(max=1))) / beta, 0)
    return r, normalised((p - accepted * share).clamp(min=0), p)


def division_factor(
    p: Float[Tensor, "batch vocab"], q: Float[Tensor, "batch vocab"], k: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """The root r in [1, k] of 1 - (1 - β)^k = r β: the least at which the residual is a law.

    Newton's steps inside a bracket, which is halved where a step would leave it; the left side falls in r, the right rises.
    """
    low, high = torch.ones_like(p[:, 0]), k.clamp(min=1).to(p.dtype)
    r = low  # the root where p = q, and a multiple one
    for _ in range(_MOST_STEPS):
        cut = p < r[:, None] * q
        beta = torch.where(cut, p / r[:, None], q).sum(-1).clamp(max=1)
        excess = 1 - (1 - beta) ** k - r * beta
        low, high = torch.where(excess > 0, r, low), torch.where(excess > 0, high, r)
        beta_slope = -torch.where(cut, p, 0).sum(-1) / r**2
        step = excess / (beta_slope * (k * (1 - beta) ** (k - 1) - r) - beta)
        found = (step.abs() <= 1e-15 * r) | (high - low <= 1e-15 * r)
        if bool(found.all()):
            break
        inside = (r - step > low) & (r - step < high)
        r = torch.where(found, r, torch.where(inside, r - step, (low + high) / 2))
    return r
