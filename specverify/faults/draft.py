"""Wrong drafters: drafts that are drawn from another law than the one that is reported, and drafts thrown away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.faults.fault import Fault
from specverify.faults.rule import rule, told
from specverify.verification import leading

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.choices import Choices, Stream
    from specverify.context import Context
    from specverify.decoding import Decoder
    from specverify.drafting import Drafter, Drafting
    from specverify.verification import Proposal

__all__ = ["DRAFT_FAULTS", "Proposing", "reporting"]


@dataclass(frozen=True)
class Proposing:
    """A drafter around another one; `propose` calls the inner one and may change what it sees and what it says."""

    inner: Drafter
    propose: Callable[[Drafting, Context, Tensor], Proposal]

    def __call__(self, context: Context) -> Drafting:
        """The inner drafter at work, seen through `propose`."""
        return _Proposing(self.inner(context), self.propose)


@dataclass
class _Proposing:
    inner: Drafting
    change: Callable[[Drafting, Context, Tensor], Proposal]

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        return self.change(self.inner, context, max_tokens)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.inner.select(rows)


@dataclass(frozen=True)
class _DrawnOtherwise:
    """Choices whose draws come from another law than the one they are asked for."""

    inner: Choices
    drawn: Callable[[Tensor], Tensor]

    def accept(self, prob: Tensor, *, stream: Stream, at: Tensor, leading: bool = False) -> Tensor:
        return self.inner.accept(prob, stream=stream, at=at, leading=leading)

    def draw(self, probs: Tensor, *, stream: Stream | Tensor, at: Tensor, guesses: Tensor | None = None) -> Tensor:
        return self.inner.draw(self.drawn(probs), stream=stream, at=at, guesses=guesses)

    def race(self, probs: Tensor, *, at: Tensor, guesses: Tensor | None = None) -> Tensor:
        return self.inner.race(self.drawn(probs), at=at, guesses=guesses)

    def moved(self, position: Tensor, step: Tensor) -> Choices:
        return self.inner.moved(position, step)

    def select(self, rows: Tensor) -> Choices:
        return self.inner.select(rows)


def reporting(drawn: Callable[[Tensor], Tensor]) -> Callable[[Decoder], Decoder]:
    """Drafts are drawn from `drawn(law)`, and the law is reported."""

    def propose(inner: Drafting, context: Context, max_tokens: Tensor) -> Proposal:
        honest = context.choices
        context.choices = _DrawnOtherwise(honest, drawn)
        try:
            return inner.propose(context, max_tokens)
        finally:
            context.choices = honest

    return lambda decoder: replace(decoder, drafter=Proposing(decoder.drafter, propose))


def _top_k(law: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """The 20 most probable ids, or a quarter of a small vocabulary."""
    smallest = law.topk(max(1, min(20, law.shape[-1] // 4)), -1).values[..., -1:]
    return torch.where(law >= smallest, law, 0)


def _top_p(law: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """The most probable ids that reach 0.8 together."""
    falling = law.sort(-1, descending=True).values
    before = falling.cumsum(-1) - falling
    smallest = torch.where(before < 0.8, falling, torch.inf).amin(-1, keepdim=True)
    return torch.where(law >= smallest, law, 0)


def _argmax(law: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    return torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).double()


def _without_unlikely(proposal: Proposal) -> Proposal:
    """A proposal ends before its first draft that is less than half as probable as its law's first choice."""
    q = proposal.draft_probs.gather(-1, proposal.token_ids[..., None])[..., 0]
    num_kept = leading((q >= 0.5 * proposal.draft_probs.amax(-1)) & proposal.drafted)
    kept = replace(proposal, num_draft_tokens=num_kept)
    return replace(kept, draft_probs=torch.where(kept.drafted[..., None], proposal.draft_probs, 0))


def _next_ids(inner: Drafting, context: Context, max_tokens: Tensor) -> Proposal:
    """The draft's ids are one less than the target's, and handed over as they are."""
    proposal = inner.propose(context, max_tokens)
    return replace(proposal, token_ids=(proposal.token_ids + 1) % proposal.draft_probs.shape[-1])


DRAFT_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="draft-temperature",
        stands_for="drafts are drawn at temperature 0.7 of the request's while the unscaled softmax is reported",
        caught_by=("lossless",),
        apply=reporting(lambda law: law ** (1 / 0.7)),
    ),
    Fault(
        name="raw-draft-probs",
        stands_for="drafts are drawn after a top-k of 20 while the raw softmax is reported",
        caught_by=("lossless",),
        apply=reporting(_top_k),
    ),
    Fault(
        name="draft-top-p",
        stands_for="top-p reaches the draft's draws and not the law that it reports",
        caught_by=("lossless",),
        apply=reporting(_top_p),
    ),
    Fault(
        name="greedy-draft-softmax",
        stands_for="greedy drafts with the softmax reported as their law",
        caught_by=("lossless",),
        apply=reporting(_argmax),
    ),
    Fault(
        name="unlikely-drafts-dropped",
        stands_for="a draft is dropped after it was drawn, because its own probability is low",
        caught_by=("exactness", "lossless"),
        apply=rule(told(_without_unlikely)),
    ),
    Fault(
        name="draft-ids-shifted",
        stands_for="draft and target number their tokens differently, and ids are handed over as they are",
        caught_by=("lossless",),
        apply=lambda decoder: replace(decoder, drafter=Proposing(decoder.drafter, _next_ids)),
    ),
)
"""The draft's law."""
