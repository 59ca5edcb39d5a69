"""Rules over a single chain of drafted tokens, all lossless."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification import Proposal, Verification, draft_row_at, leading, row_at

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["acceptance_probs", "chain_rejection", "greedy", "matching", "residual", "sample_and_match"]


def chain_rejection(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Accept with probability min(1, p/q), replace the first rejected token from norm [p - q]+ [Leviathan2023, Alg. 1].

    Lossless: accepting contributes min(p, q) to the law of a token, and the residual the missing [p - q]+. After the last
    draft nothing is subtracted, so the added token is the bonus, drawn from the target's own row [Chen2023, Alg. 2].
    """
    places = torch.arange(proposal.token_ids.shape[1], device=target_probs.device)
    probs = torch.where(proposal.drafted, acceptance_probs(proposal, target_probs), 0)
    num_accepted = leading(choices.accept(probs, stream=Stream.ACCEPT, at=places, leading=True))

    rejected = num_accepted < proposal.num_draft_tokens
    next_probs = residual(row_at(target_probs, num_accepted), draft_row_at(proposal, num_accepted))
    stream = torch.where(rejected, Stream.RESIDUAL, Stream.BONUS)
    next_token_ids = choices.draw(next_probs[:, None], stream=stream[:, None], at=num_accepted[:, None])[:, 0]
    return Verification(num_accepted, next_token_ids)


def acceptance_probs(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"]
) -> Float[Tensor, "batch k"]:
    """min(1, p(x)/q(x)) of each drafted token x; 0 where the target gives it no probability."""
    token_ids = proposal.token_ids[..., None]  # [B, k, 1]
    p = target_probs[:, : token_ids.shape[1]].gather(-1, token_ids)[..., 0]
    q = proposal.draft_probs.gather(-1, token_ids)[..., 0]
    return torch.where(p >= q, (p > 0).double(), p / q)  # p >= q also covers q = 0, so nothing divides by zero


def residual(
    target_probs: Float[Tensor, "batch vocab"], draft_probs: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch vocab"]:
    """[p - q]+, not normalised; p itself where rounding leaves no mass (p = q)."""
    positive = (target_probs - draft_probs).clamp(min=0)
    return torch.where(positive.sum(-1, keepdim=True) > 0, positive, target_probs)


def sample_and_match(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Draw the target's own token at every position, and accept while the draft guessed it.

    Lossless for any way of choosing drafts, adaptive ones too, because every emitted token is the target's own draw. The
    draws are those of target-only sampling with the same seed, so the tokens are too.
    """
    places = torch.arange(target_probs.shape[1], device=target_probs.device)
    guesses = torch.where(proposal.drafted, proposal.token_ids, -1)
    sampled = choices.draw(target_probs, stream=Stream.TARGET, at=places, guesses=guesses)
    return matching(proposal, sampled)


def greedy(proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices) -> Verification:
    """Accept while the draft is the target's most probable token, ties to the lowest id; no randomness."""
    del choices
    ids = torch.arange(target_probs.shape[-1], device=target_probs.device)
    largest = target_probs.amax(-1, keepdim=True)
    return matching(proposal, torch.where(target_probs == largest, ids, len(ids)).amin(-1))


def matching(proposal: Proposal, wanted: Int[Tensor, "batch k_plus_1"]) -> Verification:
    """Accept while the draft is what is wanted, then emit what is wanted."""
    num_accepted = leading((proposal.token_ids == wanted[:, :-1]) & proposal.drafted)
    return Verification(num_accepted, row_at(wanted, num_accepted))
