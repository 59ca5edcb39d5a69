"""Block verification: a whole block is accepted or cut at once, which never accepts less than token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification import Proposal, Verification, draft_row_at, row_at
from specverify.verification.chain import residual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["block_verification", "continuation"]


def block_verification(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Keep the longest prefix whose own coin falls; replace what follows from norm [P p - q]+ [Sun2025, Alg. 2].

    P_i is the probability with which the first i drafts, as a block, may be kept; the coin of length i falls with
    h_i = Z_i / (Z_i + 1 - P_i), where Z_i is the mass of [P_i p - q]+ at the next position, and h_g = P_g for the whole.
    """
    batch, k = proposal.token_ids.shape
    draft_probs = torch.nn.functional.pad(proposal.draft_probs, (0, 0, 0, 1))  # nothing was drafted for the bonus
    weights = [target_probs.new_ones(batch)]  # P_0 .. P_k
    for place in range(k):
        x = proposal.token_ids[:, place : place + 1]
        p, q = (laws[:, place].gather(-1, x)[:, 0] for laws in (target_probs, draft_probs))
        weights.append((weights[-1] * torch.where(q > 0, p / q, 0)).clamp(max=1))
    weight = torch.stack(weights, 1)  # [B, k + 1]
    left_over = (weight[..., None] * target_probs - draft_probs).clamp(min=0).sum(-1)  # Z
    whole = torch.arange(k + 1, device=weight.device) == proposal.num_draft_tokens[:, None]
    coins = torch.where(whole, weight, continuation(left_over, weight))
    places = torch.arange(k, device=weight.device)
    falls = choices.accept(torch.where(proposal.drafted, coins[:, 1:], 0), stream=Stream.ACCEPT, at=places)
    num_accepted = (falls * (places + 1)).amax(-1) if k else torch.zeros_like(proposal.num_draft_tokens)

    kept = weight.gather(1, num_accepted[:, None])
    next_probs = residual(kept * row_at(target_probs, num_accepted), draft_row_at(proposal, num_accepted))
    stream = torch.where(num_accepted < proposal.num_draft_tokens, Stream.RESIDUAL, Stream.BONUS)
    next_token_ids = choices.draw(next_probs[:, None], stream=stream[:, None], at=num_accepted[:, None])[:, 0]
    return Verification(num_accepted, next_token_ids)


def continuation(left_over: Float[Tensor, "*shape"], weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Z / (Z + 1 - P); 1 where nothing is left over and nothing is missing (P = 1, p = q), since such a block goes on."""
    return torch.where(left_over + 1 - weight > 0, left_over / (left_over + 1 - weight), 1.0)
