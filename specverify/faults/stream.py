"""Right rules with wrong randomness: streams that share a uniform, seeds that are lost, uniforms too coarse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.faults.fault import Fault
from specverify.faults.rule import ChainParts, rule
from specverify.verification.chain import acceptance_probs, residual

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specverify.choices import Choices
    from specverify.context import Context, Row
    from specverify.decoding import Decoder
    from specverify.drafting import Drafter, Drafting
    from specverify.verification import Proposal

__all__ = ["STREAM_FAULTS"]

_GRID = 256
"""Values of a uniform with the 8 significant bits of bfloat16, in [0, 1)."""


def _coarse_accept(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """The probability that k / 256 <= p for a random k in 0 .. 255."""
    probs = acceptance_probs(proposal, target_probs)
    return ((probs * _GRID).floor() + 1).clamp(max=_GRID) / _GRID


def _coarse_draw(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What the inverse CDF gives to each id when the uniform is k / 256: an id between two of those is never drawn."""
    mass = residual(target_probs, draft_probs)
    cdf = mass.cumsum(-1) / mass.sum(-1, keepdim=True)
    drawn_below = (cdf * _GRID - 1e-9).ceil().clamp(0, _GRID)
    return drawn_below.diff(dim=-1, prepend=torch.zeros_like(drawn_below[..., :1])) / _GRID


def _keyed(seed: Callable[[Row], int], sequence: Callable[[Row], int]) -> Callable[[Decoder], Decoder]:
    """Choices of other seeds than the requests'."""

    def apply(decoder: Decoder) -> Decoder:
        def choices(rows: Sequence[Row]) -> Choices:
            device = decoder.target.device
            seeds, sequences = (torch.tensor([key(row) for row in rows], device=device) for key in (seed, sequence))
            return Philox.start(seeds, sequences, window=decoder.num_speculative_tokens + 1)

        return replace(decoder, choices=choices)

    return apply


@dataclass(frozen=True)
class _Reseeded:
    """Choices that forget where they stand: every step gets the uniforms of the first."""

    inner: Choices

    def accept(self, prob: Tensor, *, stream: Stream, at: Tensor, leading: bool = False) -> Tensor:
        return self.inner.accept(prob, stream=stream, at=at, leading=leading)

    def draw(self, probs: Tensor, *, stream: Stream | Tensor, at: Tensor, guesses: Tensor | None = None) -> Tensor:
        return self.inner.draw(probs, stream=stream, at=at, guesses=guesses)

    def race(self, probs: Tensor, *, at: Tensor, guesses: Tensor | None = None) -> Tensor:
        return self.inner.race(probs, at=at, guesses=guesses)

    def moved(self, position: Tensor, step: Tensor) -> Choices:
        del position, step
        return self

    def select(self, rows: Tensor) -> Choices:
        return _Reseeded(self.inner.select(rows))


def _reseeded(decoder: Decoder) -> Decoder:
    def choices(rows: Sequence[Row]) -> Choices:
        device = decoder.target.device
        seeds = torch.tensor([row.request.seed for row in rows], device=device)
        samples = torch.tensor([row.sample for row in rows], device=device)
        return _Reseeded(Philox.start(seeds, samples, window=decoder.num_speculative_tokens + 1))

    return replace(decoder, choices=choices)


def _seeded_by_place(decoder: Decoder) -> Decoder:
    """Rows are keyed by their place in the batch, not by their request."""

    @dataclass(frozen=True)
    class Placed:
        inner: Drafter

        def __call__(self, context: Context) -> Drafting:
            choices = context.choices
            places = torch.arange(len(context.rows), device=context.lengths.device)
            context.choices = replace(choices, sequence=places)  # type: ignore[type-var]  # only Philox has a sequence
            return self.inner(context)

    return replace(decoder, drafter=Placed(decoder.drafter))


STREAM_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="draft-noise-in-accept",
        stands_for="the uniform that drew the draft also accepts it",
        caught_by=("boundary", "lossless"),
        apply=rule(ChainParts(accept_stream=Stream.DRAFT)),
    ),
    Fault(
        name="draft-noise-in-residual",
        stands_for="the uniform that drew the draft also draws its replacement",
        caught_by=("boundary", "lossless"),
        apply=rule(ChainParts(residual_stream=Stream.DRAFT)),
    ),
    Fault(
        name="draft-noise-in-bonus",
        stands_for="the uniform that drew the last draft also draws the bonus",
        caught_by=("boundary", "lossless"),
        apply=rule(ChainParts(bonus_stream=Stream.DRAFT, bonus_at=lambda place: place - 1)),
    ),
    Fault(
        name="accept-noise-in-residual",
        stands_for="the uniform that rejected the draft also draws its replacement",
        caught_by=("boundary", "lossless"),
        apply=rule(ChainParts(residual_stream=Stream.ACCEPT)),
    ),
    Fault(
        name="accept-noise-in-bonus",
        stands_for="the uniform that accepted the last draft also draws the bonus",
        caught_by=("boundary", "lossless"),
        apply=rule(ChainParts(bonus_stream=Stream.ACCEPT, bonus_at=lambda place: place - 1)),
    ),
    Fault(
        name="one-uniform-a-block",
        stands_for="one uniform decides on all drafts of a block",
        caught_by=("acceptance",),
        apply=rule(ChainParts(accept_at=torch.zeros_like)),
    ),
    Fault(
        name="accept-uniform-bfloat16",
        stands_for="acceptance uniforms are drawn in bfloat16 and compared with <=: they lie on a grid of 1/256, 0 included",
        caught_by=("exactness",),
        apply=rule(ChainParts(accept_probs=_coarse_accept)),
    ),
    Fault(
        name="draw-uniform-bfloat16",
        stands_for="tokens are drawn with a uniform of 8 bits: rare ids vanish, others gain",
        caught_by=("exactness",),
        apply=rule(ChainParts(residual=_coarse_draw)),
    ),
    Fault(
        name="seed-ignored",
        stands_for="every request uses the same seed, whatever it asked for",
        caught_by=("reproducibility",),
        apply=_keyed(lambda _: 0, lambda row: row.sample),
    ),
    Fault(
        name="samples-share-seed",
        stands_for="all samples of a request use the same random numbers",
        caught_by=("reproducibility", "lossless"),
        apply=_keyed(lambda row: row.request.seed, lambda _: 0),
    ),
    Fault(
        name="generator-reseeded",
        stands_for="the generator is seeded anew for every step, which then repeats the random numbers of the one before",
        caught_by=("lossless",),
        apply=_reseeded,
    ),
    Fault(
        name="seed-by-batch-place",
        stands_for="a request's random numbers depend on its place in the batch",
        caught_by=("reproducibility",),
        apply=_seeded_by_place,
    ),
)
"""Shared uniforms, lost seeds, coarse uniforms."""
