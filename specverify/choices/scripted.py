"""Choices that are chosen: to force any accept/reject pattern, and to stand exactly on an edge (u = 0)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream, first_of_race, inverse_cdf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Scripted"]


@dataclass(frozen=True)
class Scripted:
    """Answers every question of a stream with the same uniform (0 unless said otherwise)."""

    uniforms: Mapping[Stream, float] = field(default_factory=dict)

    def uniform(self, stream: Stream | Int[Tensor, "batch n"], at: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n"]:
        """The scripted value of each place's stream."""
        values = torch.tensor(
            [self.uniforms.get(known, 0.0) for known in Stream], dtype=torch.float64, device=at.device
        )
        return values[torch.as_tensor(stream, dtype=torch.int64, device=at.device)].expand_as(at)

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """Strictly below, like every other."""
        del leading
        return self.uniform(stream, at.expand(prob.shape)) < prob

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """Inverse CDF of the scripted uniform."""
        del guesses
        return inverse_cdf(probs, self.uniform(stream, at.expand(probs.shape[:-1])))

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """Every id has the same noise, that of the `TARGET` stream's uniform, so the most probable id wins."""
        del guesses
        uniform = self.uniform(Stream.TARGET, at.expand(probs.shape[:-1]))
        return first_of_race(probs, uniform[..., None].expand_as(probs))

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Scripted:
        """The script is the same everywhere."""
        del position, step
        return self

    def select(self, rows: Int[Tensor, " rows"]) -> Scripted:
        """The script is the same for every row."""
        del rows
        return self
