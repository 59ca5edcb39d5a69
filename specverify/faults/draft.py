"""Wrong drafters: drafts that are drawn from another law than the one that is reported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.choices import Choices, Stream
    from specverify.context import Context
    from specverify.decoding import Decoder
    from specverify.drafting import Drafter, Drafting
    from specverify.verification import Proposal


@dataclass(frozen=True)
class _ReportedOtherwise:
    """Drafts drawn from `drawn(law)`, while the law itself is reported to the rule."""

    inner: Drafter
    drawn: Callable[[Tensor], Tensor]

    def __call__(self, context: Context) -> Drafting:
        drafting = self.inner(context)
        return _ReportingOtherwise(drafting, self.drawn)


@dataclass
class _ReportingOtherwise:
    inner: Drafting
    drawn: Callable[[Tensor], Tensor]

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        honest = context.choices
        context.choices = _DrawnOtherwise(honest, self.drawn)
        try:
            return self.inner.propose(context, max_tokens)
        finally:
            context.choices = honest

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

    def moved(self, position: Tensor, step: Tensor) -> Choices:
        return self.inner.moved(position, step)

    def select(self, rows: Tensor) -> Choices:
        return self.inner.select(rows)


def reporting(drawn: Callable[[Tensor], Tensor]) -> Callable[[Decoder], Decoder]:
    """Drafts are drawn from `drawn(law)`, and the law is reported."""
    return lambda decoder: replace(decoder, drafter=_ReportedOtherwise(decoder.drafter, drawn))


def top_k(law: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """The 20 most probable ids, or a quarter of a small vocabulary."""
    smallest = law.topk(max(1, min(20, law.shape[-1] // 4)), -1).values[..., -1:]
    return torch.where(law >= smallest, law, 0)
