"""Wrong acceptance rules: chain rejection taken apart, one line of it changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.faults.fault import Fault
from specverify.verification import Proposal, Rule, Verification, leading, row_at
from specverify.verification.chain import acceptance_probs, chain_rejection, greedy, residual

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.decoding import Decoder

__all__ = ["RULE_FAULTS", "ChainParts", "rule", "told"]


def _same(place: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    return place


def _reported(proposal: Proposal) -> Float[Tensor, "batch k vocab"]:
    return proposal.draft_probs


@dataclass(frozen=True, kw_only=True)
class ChainParts:
    """Chain rejection taken apart, so that a fault can change one line of it."""

    accept_probs: Callable[[Proposal, Tensor], Tensor] = acceptance_probs
    accept_stream: Stream = Stream.ACCEPT
    accept_at: Callable[[Tensor], Tensor] = _same
    """Which uniform of the stream each place uses."""
    counted: Callable[[Tensor], Tensor] = leading
    """How many are accepted, from which are."""
    subtracted: Callable[[Proposal], Tensor] = _reported
    """What the residual is told of the draft's law."""
    residual: Callable[[Tensor, Tensor], Tensor] = residual
    residual_row: Callable[[Tensor], Tensor] = _same
    residual_stream: Stream = Stream.RESIDUAL
    bonus_row: Callable[[Tensor], Tensor] = _same
    bonus_from_draft: bool = False
    bonus_stream: Stream = Stream.BONUS
    bonus_at: Callable[[Tensor], Tensor] = _same

    def __call__(
        self, proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
    ) -> Verification:
        """Chain rejection, with whatever part was changed."""
        places = torch.arange(proposal.token_ids.shape[1], device=target_probs.device)
        probs = torch.where(proposal.drafted, self.accept_probs(proposal, target_probs), 0)
        accepted = choices.accept(
            probs, stream=self.accept_stream, at=self.accept_at(places), leading=self.counted is leading
        )
        num_accepted = self.counted(accepted)
        rejected = num_accepted < proposal.num_draft_tokens
        next_probs = self._next_probs(proposal, target_probs, num_accepted, rejected)
        stream = torch.where(rejected, self.residual_stream, self.bonus_stream)
        at = torch.where(rejected, num_accepted, self.bonus_at(num_accepted).clamp(min=0))
        drawn = choices.draw(next_probs[:, None], stream=stream[:, None], at=at[:, None])
        return Verification(num_accepted, drawn[:, 0])

    def _next_probs(
        self,
        proposal: Proposal,
        target_probs: Float[Tensor, "batch k_plus_1 vocab"],
        num_accepted: Int[Tensor, " batch"],
        rejected: Bool[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """The law of the token after the accepted ones."""
        draft_probs = torch.nn.functional.pad(self.subtracted(proposal), (0, 0, 0, 1))
        row = torch.where(rejected, self.residual_row(num_accepted), self.bonus_row(num_accepted))
        row = row.clamp(0, target_probs.shape[1] - 1)
        subtracted = torch.where(rejected[:, None], row_at(draft_probs, row), 0)
        probs = self.residual(row_at(target_probs, row), subtracted)
        if self.bonus_from_draft and proposal.token_ids.shape[1]:
            last_law = row_at(proposal.draft_probs, (proposal.num_draft_tokens - 1).clamp(min=0))
            drafted = ~rejected & (proposal.num_draft_tokens > 0)
            probs = torch.where(drafted[:, None], last_law, probs)
        return torch.where(probs.sum(-1, keepdim=True) > 0, probs, row_at(target_probs, row))


def rule(rule: Rule) -> Callable[[Decoder], Decoder]:
    """The decoder with another rule."""
    return lambda decoder: replace(decoder, rule=rule)


def told(change: Callable[[Proposal], Proposal]) -> Rule:
    """Chain rejection that is told something else than what was drafted."""
    return lambda proposal, target_probs, choices: chain_rejection(change(proposal), target_probs, choices)


# ---------------------------------------------------------------------------------------------- acceptance


def _always(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Every draft is accepted."""
    del target_probs
    return torch.ones_like(proposal.draft_probs[..., 0])


def _or_equal(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """`u <= p` is `u < p'` with p' the next larger float; at p = 0 that accepts u = 0."""
    probs = acceptance_probs(proposal, target_probs)
    return torch.nextafter(probs, torch.full_like(probs, 2.0))


def _inflated(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The acceptance ratio times 1.1."""
    return (1.1 * acceptance_probs(proposal, target_probs)).clamp(max=1)


def _root(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The square root of the acceptance ratio."""
    return acceptance_probs(proposal, target_probs).sqrt()


def _of_drafted(probs: Tensor, proposal: Proposal) -> Tensor:
    """Each row's probability of the id that was drafted there."""
    return probs.gather(-1, proposal.token_ids[..., None])[..., 0]


def _inverted(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """min(1, q/p)."""
    p, q = (_of_drafted(probs, proposal) for probs in (target_probs[:, :-1], proposal.draft_probs))
    return (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)


def _next_rows(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Each draft is held against the row after its own."""
    return acceptance_probs(proposal, target_probs[:, 1:])


def _typical(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Accept what is not surprising: p(x) > min(0.3, 0.3 exp(-H)) [Medusa2024]."""
    entropy = torch.special.entr(target_probs[:, :-1]).sum(-1)
    return (_of_drafted(target_probs[:, :-1], proposal) > 0.3 * torch.exp(-entropy)).double()


def _all_but_last(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The last draft of a block is always rejected."""
    places = torch.arange(proposal.token_ids.shape[1], device=target_probs.device)
    last = places == proposal.num_draft_tokens[:, None] - 1
    return torch.where(last, 0, acceptance_probs(proposal, target_probs))


def _all_flags(flags: Bool[Tensor, "batch k"]) -> Int[Tensor, " batch"]:
    """Those after the first that is not set, too."""
    return flags.long().sum(-1)


# ---------------------------------------------------------------------------------------------- residual


def _unclamped(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """|p - q|."""
    return (target_probs - draft_probs).abs()


def _floored(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """[p - q] clamped at 1e-3 in place of 0: every id may be drawn."""
    return (target_probs - draft_probs).clamp(min=1e-3)


def _not_renormalised(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """A uniform that is not scaled to the residual's mass runs past its end, to the last id."""
    positive = (target_probs - draft_probs).clamp(min=0)
    missing = (1 - positive.sum(-1, keepdim=True)).clamp(min=0)
    return torch.cat((positive[..., :-1], positive[..., -1:] + missing), -1)


def _only_the_drafted(proposal: Proposal) -> Float[Tensor, "batch k vocab"]:
    """A point mass on each draft, so that [p - 1]+ is p without it."""
    return Proposal.point_masses(
        proposal.token_ids, proposal.num_draft_tokens, proposal.draft_probs.shape[-1]
    ).draft_probs


def _correction_thrown_away(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """The replacement is drawn, and the rejected draft is emitted."""
    right = chain_rejection(proposal, target_probs, choices)
    rejected = right.num_accepted_tokens < proposal.num_draft_tokens
    padded = torch.nn.functional.pad(proposal.token_ids, (0, 1))
    draft_ids = padded.gather(1, right.num_accepted_tokens[:, None])[:, 0]
    return replace(right, next_token_ids=torch.where(rejected, draft_ids, right.next_token_ids))


RULE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="residual-from-target",
        stands_for="the replacement of a rejected token is drawn from the target instead of [p - q]+",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual=lambda p, _: p)),
    ),
    Fault(
        name="residual-without-token-only",
        stands_for="the replacement is drawn from the target without the rejected token, instead of [p - q]+",
        caught_by=("exactness",),
        apply=rule(ChainParts(subtracted=_only_the_drafted)),
    ),
    Fault(
        name="residual-not-clamped",
        stands_for="|p - q| in place of [p - q]+",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual=_unclamped)),
    ),
    Fault(
        name="residual-floor",
        stands_for="the residual is clamped at a small number in place of 0, so that ids without any mass can be drawn",
        caught_by=("exactness",),
        apply=rule(ChainParts(residual=_floored)),
    ),
    Fault(
        name="residual-not-renormalised",
        stands_for="the residual is drawn from as if it added up to 1; what is missing falls to the last id",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual=_not_renormalised)),
    ),
    Fault(
        name="correction-thrown-away",
        stands_for="the replacement is computed, and the rejected draft is emitted all the same",
        caught_by=("exactness", "greedy"),
        apply=rule(_correction_thrown_away),
    ),
    Fault(
        name="bonus-from-draft",
        stands_for="the token after a fully accepted block comes from the draft",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(bonus_from_draft=True)),
    ),
    Fault(
        name="greedy-verification",
        stands_for="drafts are verified greedily whatever the temperature",
        caught_by=("exactness", "lossless"),
        apply=rule(greedy),
    ),
    Fault(
        name="typical-acceptance",
        stands_for="drafts are accepted where the target does not find them surprising, and that is called lossless",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(accept_probs=_typical)),
    ),
    Fault(
        name="always-accept",
        stands_for="every draft is accepted",
        caught_by=("exactness", "greedy", "lossless"),
        apply=rule(ChainParts(accept_probs=_always)),
    ),
    Fault(
        name="accept-after-rejection",
        stands_for="drafts after the first rejected one are still counted as accepted",
        caught_by=("exactness", "greedy"),
        apply=rule(ChainParts(counted=_all_flags)),
    ),
    Fault(
        name="last-draft-never-accepted",
        stands_for="a loop that ends one draft early rejects the last one, whatever its ratio",
        caught_by=("exactness", "acceptance"),
        apply=rule(ChainParts(accept_probs=_all_but_last)),
    ),
    Fault(
        name="ratio-inflated",
        stands_for="the acceptance ratio is multiplied by 1.1",
        caught_by=("exactness", "acceptance"),
        apply=rule(ChainParts(accept_probs=_inflated)),
    ),
    Fault(
        name="ratio-square-root",
        stands_for="the square root of the acceptance ratio is used",
        caught_by=("exactness", "lossless", "acceptance"),
        apply=rule(ChainParts(accept_probs=_root)),
    ),
    Fault(
        name="ratio-inverted",
        stands_for="target and draft are swapped in the acceptance ratio",
        caught_by=("exactness", "greedy"),
        apply=rule(ChainParts(accept_probs=_inverted)),
    ),
    Fault(
        name="accept-next-row",
        stands_for="each draft is held against the target's row after its own",
        caught_by=("exactness", "greedy"),
        apply=rule(ChainParts(accept_probs=_next_rows)),
    ),
    Fault(
        name="accept-or-equal",
        stands_for="`u <= p`: a token of probability 0 passes when the uniform is exactly 0",
        caught_by=("exactness",),
        apply=rule(ChainParts(accept_probs=_or_equal)),
    ),
)
"""Acceptance and residual."""
