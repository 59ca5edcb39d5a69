"""Where a function under test gets its random numbers: undrawn on a path, drawn from a seed, or standing on an edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from specverify.choices import Choices, Stream
from specverify.choices.philox import Philox
from specverify.choices.scripted import Scripted
from specverify.qualify.lazy import Following, lazy_uniforms

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.qualify.paths import Path

__all__ = ["Drawn", "Edge", "OnPath", "Randomness"]


class Randomness(Protocol):
    """The random numbers of one call."""

    def entered(self) -> AbstractContextManager[object]:
        """A context in which torch's own generators answer with them."""
        ...

    def uniforms(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """To hand to a function that takes them."""
        ...

    def choices(self, batch: int) -> Choices:
        """To hand to a rule of specverify."""
        ...


@dataclass
class OnPath:
    """Undrawn: every outcome in turn, with its exact weight."""

    path: Path

    def entered(self) -> Following:
        """Torch's generators answer with numbers that were not drawn."""
        return Following(self.path)

    def uniforms(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Not drawn yet."""
        return lazy_uniforms(self.path, shape, dtype)

    def choices(self, batch: int) -> Choices:
        """One uniform a stream, row and position."""
        return _PathChoices(self.path, list(range(batch)))


@dataclass
class Drawn:
    """Drawn by torch's own generators from a seed."""

    seed: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed + 1)

    def entered(self) -> _Seeded:
        """Torch's generators start at the seed, and are put back afterwards."""
        return _Seeded(self.seed)

    def uniforms(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next ones, independent of what torch's own generator gives."""
        return torch.rand(shape, dtype=dtype, generator=self._generator)

    def choices(self, batch: int) -> Choices:
        """Counter-based, keyed by row."""
        return Philox.start(torch.full((batch,), self.seed), torch.arange(batch))


@dataclass
class Edge:
    """Every uniform is `value`: 0, which `torch.rand` does return, is where `u <= p` differs from `u < p`."""

    value: float = 0.0

    def entered(self) -> _Constant:
        """Torch's uniforms are all `value`; its other draws are drawn."""
        return _Constant(self.value)

    def uniforms(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All `value`."""
        return torch.full(shape, self.value, dtype=dtype)

    def choices(self, batch: int) -> Choices:
        """All `value`."""
        del batch
        return Scripted(dict.fromkeys(Stream, self.value))


class _Seeded:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        torch.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._before)


class _Constant(TorchFunctionMode):
    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """As torch, but for uniforms."""
        del types
        result = func(*args, **(kwargs or {}))
        return (
            result.fill_(self._value) if getattr(func, "__name__", "") in ("rand", "rand_like", "uniform_") else result
        )


@dataclass
class _PathChoices:
    """Choices whose uniforms are undrawn: one that two streams share is the same one."""

    path: Path
    rows: list[int]

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """`uniform < prob`, the path forking where both can be."""
        accepted = torch.zeros(prob.shape, dtype=torch.bool)
        for place, probs in enumerate(prob.double().tolist()):
            for column, (bound, position) in enumerate(zip(probs, at.tolist(), strict=True)):
                self.path.next_operation()
                accepted[place, column] = self.path.below(self._uniform(stream, place, position), bound)
                if leading and not accepted[place, column]:
                    break
        return accepted

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """Inverse cumulative distribution of one uniform each."""
        drawn = torch.zeros(probs.shape[:-1], dtype=torch.int64)
        streams = torch.as_tensor(stream).expand(drawn.shape)
        cdf = probs.double().cumsum(-1)
        ends = (cdf / cdf[..., -1:]).tolist()
        for place, (rows, positions) in enumerate(zip(ends, at.expand(drawn.shape).tolist(), strict=True)):
            for column, (row, position) in enumerate(zip(rows, positions, strict=True)):
                self.path.next_operation()
                uniform = self._uniform(Stream(int(streams[place, column])), place, position)
                drawn[place, column] = self.path.interval(uniform, row)
                if guesses is not None and column < guesses.shape[1] and drawn[place, column] != guesses[place, column]:
                    break
        return drawn

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """The position's own draw: each winner has its law, though two laws agree otherwise than in a race."""
        return self.draw(probs, stream=Stream.TARGET, at=at, guesses=guesses)

    def _uniform(self, stream: Stream, place: int, position: int) -> int:
        return self.path.named((stream, self.rows[place], position))

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> _PathChoices:
        """One step only is asked here."""
        del position, step
        return self

    def select(self, rows: Int[Tensor, " rows"]) -> _PathChoices:
        """These rows only, with their own uniforms."""
        return _PathChoices(self.path, [self.rows[row] for row in rows.tolist()])
