"""Cheap counter-based uniforms for millions of tiny sequences: two rounds of SplitMix64's mixer, a tenth of Philox's price.

Same keys as `Philox` (seed, stream, sequence, position, step), other bits. A uniform is the mixer over the exclusive or of
two mixed words, one for who asks (seed, sequence) and one for what for (stream, position, step): each is a bijection of its
64-bit key, so no two sequences of a stream share a uniform. [Steele2014] found no failure of the mixer in BigCrush; it is
less tested than Philox, and nothing that certifies a model uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream, first_of_race, inverse_cdf

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["SplitMix", "mix64"]

_RACE = 0xFF
"""In the place of a stream: the noise of races, with an id in the place of a step."""


def _signed(word: int) -> int:
    """The int64 with these 64 bits."""
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def mix64(word: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The output of SplitMix64 in the state `word`: a bijection of 64 bits, held in int64 [Steele2014, Fig. 17]."""
    word = word + _GOLDEN
    word ^= (word >> 30).bitwise_and_(2**34 - 1)  # the shift of an int64 is arithmetic
    word *= _FIRST
    word ^= (word >> 27).bitwise_and_(2**37 - 1)
    word *= _SECOND
    word ^= (word >> 31).bitwise_and_(2**33 - 1)
    return word


@dataclass(frozen=True)
class SplitMix:
    """Choices for a batch of sequences; `position` and `step` have one entry for all of them, or one each."""

    who: Int[Tensor, " batch"]
    """Seed and sequence, mixed."""
    seed: Int[Tensor, " 1"]
    position: Int[Tensor, " batch_or_1"]
    step: Int[Tensor, " batch_or_1"]

    @staticmethod
    def start(seed: int, sequence: Int[Tensor, " batch"]) -> SplitMix:
        """At the first token of the first step."""
        seeds = torch.tensor([seed], dtype=torch.int64)
        zero = torch.zeros(1, dtype=torch.int64)
        return SplitMix(mix64(sequence ^ mix64(seeds)), mix64(~seeds), zero, zero)

    def moved(self, position: Int[Tensor, " batch_or_1"], step: Int[Tensor, " batch_or_1"]) -> SplitMix:
        """The same sequences, standing elsewhere."""
        return replace(self, position=position, step=step)

    def select(self, rows: Int[Tensor, " rows"]) -> SplitMix:
        """These rows only."""
        position, step = (each if len(each) == 1 else each[rows] for each in (self.position, self.step))
        return replace(self, who=self.who[rows], position=position, step=step)

    def uniform(
        self, stream: Stream | Int[Tensor, "batch n"], at: Int[Tensor, " n"] | Int[Tensor, "batch n"]
    ) -> Float[Tensor, "batch n"]:
        """53-bit uniforms in [0, 1) at the offsets `at` of each row's block; the `TARGET` stream ignores the step."""
        step = self.step[:, None]
        if isinstance(stream, Stream):
            step = step * (stream is not Stream.TARGET)
        else:
            step = torch.where(stream == Stream.TARGET, 0, step)
        return self._uniform(stream, self.position[:, None] + at, step)

    def _uniform(
        self, stream: int | Int[Tensor, "batch n"], position: Int[Tensor, "rows n"], step: Int[Tensor, "rows n"]
    ) -> Float[Tensor, "batch n"]:
        """Eight bits of stream, 24 of position, 32 of step."""
        what_for = mix64((position << 8) + (step << 32) + stream ^ self.seed)
        word = mix64(self.who[:, None] ^ what_for)
        return (word >> 11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """True where the uniform lies strictly below `prob`."""
        del leading
        return self.uniform(stream, at) < prob

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """One id from each row's law."""
        del guesses
        return inverse_cdf(probs, self.uniform(stream, at))

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """The id whose Exp(1) noise over its probability is least; the noise is the position's, whatever the law."""
        del guesses
        at = at.expand(probs.shape[:-1])
        position = self.position[:, None] + at  # [B, n]
        ids = torch.arange(probs.shape[-1])
        uniform = self._uniform(_RACE, position.repeat_interleave(len(ids), 1), ids.repeat(at.shape[1]))
        return first_of_race(probs, uniform.view(probs.shape))
