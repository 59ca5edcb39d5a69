"""Wrong acceptance rules: chain rejection taken apart, one line of it changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification import Proposal, Rule, Verification, leading, row_at
from specverify.verification.chain import acceptance_probs, residual

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specverify.decoding import Decoder


@dataclass(frozen=True)
class ChainParts:
    """Chain rejection taken apart, so that a fault can change one line of it."""

    accept_probs: Callable[[Proposal, Tensor], Tensor] = acceptance_probs
    residual: Callable[[Tensor, Tensor], Tensor] = residual
    rejected_row: Callable[[Tensor], Tensor] = lambda place: place
    """Which row the residual is taken from."""
    bonus_from_draft: bool = False
    accept_stream: Stream = Stream.ACCEPT
    residual_stream: Stream = Stream.RESIDUAL

    def __call__(self, proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
        """Chain rejection, with whatever part was changed."""
        places = torch.arange(proposal.token_ids.shape[1], device=target_probs.device)
        probs = torch.where(proposal.drafted, self.accept_probs(proposal, target_probs), 0)
        num_accepted = leading(choices.accept(probs, stream=self.accept_stream, at=places, leading=True))
        rejected = num_accepted < proposal.num_draft_tokens
        draft_probs = torch.nn.functional.pad(proposal.draft_probs, (0, 0, 0, 1))
        row = torch.where(rejected, self.rejected_row(num_accepted), num_accepted).clamp(max=target_probs.shape[1] - 1)
        next_probs = self.residual(row_at(target_probs, row), row_at(draft_probs, row))
        if self.bonus_from_draft and proposal.token_ids.shape[1]:
            last_law = row_at(proposal.draft_probs, (proposal.num_draft_tokens - 1).clamp(min=0))
            drafted = ~rejected & (proposal.num_draft_tokens > 0)
            next_probs = torch.where(drafted[:, None], last_law, next_probs)
        next_probs = torch.where(next_probs.sum(-1, keepdim=True) > 0, next_probs, row_at(target_probs, row))
        stream = torch.where(rejected, self.residual_stream, Stream.BONUS)
        drawn = choices.draw(next_probs[:, None], stream=stream[:, None], at=num_accepted[:, None])
        return Verification(num_accepted, drawn[:, 0])


def rule(rule: Rule) -> Callable[[Decoder], Decoder]:
    """The decoder with another rule."""
    return lambda decoder: replace(decoder, rule=rule)


def always(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Every draft is accepted."""
    del target_probs
    return torch.ones_like(proposal.draft_probs[..., 0])


def or_equal(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """`u <= p` is `u < p'` with p' the next larger float; at p = 0 that accepts u = 0."""
    probs = acceptance_probs(proposal, target_probs)
    return torch.nextafter(probs, torch.full_like(probs, 2.0))


def inflated(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The acceptance ratio times 1.1."""
    return (1.1 * acceptance_probs(proposal, target_probs)).clamp(max=1)


def root(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The square root of the acceptance ratio."""
    return acceptance_probs(proposal, target_probs).sqrt()


def unclamped(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """|p - q|."""
    return (target_probs - draft_probs).abs()
