"""The one seam of randomness: nothing else in specverify calls a generator.

Note [Choices]: a rule asks `accept` and `draw` and never sees where the randomness comes from. `Philox` answers from a
counter-based generator, `Enumerate` replays the program over every path with exact weights, `Scripted` answers with
chosen uniforms. So the code whose exact law is proved is the code that runs.

Note [Streams]: draft, accept, residual and bonus are separate streams, because each shared uniform is a public bug class
(a draft that is accepted *because* its own uniform was small follows neither law). `TARGET` is keyed by the position
alone, so sample-and-match emits exactly what target-only sampling emits with the same seed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch

from specverify.errors import InternalError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Choices", "Stream", "first_of_race", "inverse_cdf"]


class Stream(IntEnum):
    """What a uniform is for; two streams never share one."""

    TARGET = 0
    """The target's own draw at a position: target-only sampling, sample-and-match."""
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    JITTER = 5
    """The scorer's randomised PIT; never the decoder's."""


class Choices(Protocol):
    """Randomness for one step of a batch; `at` is the offset of a token inside the step's block."""

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """True with probability `prob`, decided by `uniform < prob`: never true at 0, always at 1.

        `leading` says that nothing after a row's first rejection will be looked at, so that no path need fork there.
        """
        ...

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """One id from each row's law (need not be normalised): inverse CDF of one uniform.

        `guesses` says that nothing after a row's first draw that differs from its guess will be looked at.
        """
        ...

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """One id from each row's law: the argmin of Exp(1) noise over probability [Daliri2024].

        The noise is the position's, whatever the law and the step: two laws at one position run the same race. `guesses`
        says what it says to `draw`.
        """
        ...

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Choices:
        """The same sequences, standing before their token number `position`, in their step number `step`."""
        ...

    def select(self, rows: Int[Tensor, " rows"]) -> Choices:
        """These rows only."""
        ...


def inverse_cdf(probs: Float[Tensor, "*rows vocab"], uniform: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """The id whose interval of the cumulative distribution holds `uniform`; always one of positive probability.

    Rows need not be normalised. Raises `InternalError` where a row has no positive mass.
    """
    cdf = probs.double().cumsum(-1)  # [..., V]
    total = cdf[..., -1:].contiguous()
    if not bool((total > 0).all()):
        msg = "a token was to be drawn from a row without positive probability"
        raise InternalError(msg)
    reached = torch.minimum(uniform.unsqueeze(-1) * total, _below(total))  # u * total may round up to total
    return torch.searchsorted(cdf, reached, right=True).squeeze(-1)  # the first id with cdf > u * total


def _below(mass: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The next smaller float."""
    return torch.nextafter(mass, torch.zeros_like(mass))


def first_of_race(probs: Float[Tensor, "*rows vocab"], uniform: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
    """The id whose Exp(1) noise over its probability is least, ties to the lowest id; never one of probability 0."""
    noise = (-torch.log1p(-uniform)).clamp(min=2.0**-54)  # never 0, so that nothing is 0/0
    return (noise / probs.double()).argmin(-1)
