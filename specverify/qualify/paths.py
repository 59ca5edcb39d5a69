"""Every path of a program that asks for uniforms, each with its exact weight, by running it again from the start.

Note [Lazy uniforms]: a uniform is known only to lie in an interval, at first all of [0, 1). A comparison with a number
inside splits the interval: the path forks, with the lengths of the parts as weights, and goes on in one of them. So a
uniform that is used twice is seen exactly: the second question forks only inside what the first left. A uniform of a
dtype is one of `steps` equidistant values (2^24 in float32, 2^8 in bfloat16, as `torch.rand` makes them), so `u <= 0` has
the probability that it has in a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from specverify.errors import SpecverifyError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

__all__ = ["FINEST", "NotFollowed", "Path", "every"]

FINEST = 2**53
"""Steps of a float64 uniform."""
_MOST_PATHS = 200_000
_Outcome = TypeVar("_Outcome")


class NotFollowed(SpecverifyError):
    """The function did something with its randomness whose exact law isn't computed here; it is sampled instead."""


@dataclass
class _Uniform:
    """One of the values low/steps .. (high - 1)/steps, all equally likely."""

    steps: int
    low: int
    high: int
    renewed: int
    """The operation that it was last reset at."""


@dataclass
class Path:
    """One run: replays `record`, takes the first possible outcome where the record ends, and notes the others.

    With `independent`, each operation sees uniforms of its own, whatever was asked of them before: the law that the same
    code would have if no random number were used twice.
    """

    record: tuple[int, ...] = ()
    independent: bool = False
    weight: float = 1.0
    coarsest: int = FINEST
    """The fewest steps of a uniform that was asked for."""
    siblings: list[tuple[int, ...]] = field(default_factory=list)
    handed_out: int = 0
    """Random numbers that torch's functions gave."""
    looked_at: int = 0
    """How often torch's functions decided by one."""
    _taken: list[int] = field(default_factory=list)
    _uniforms: list[_Uniform] = field(default_factory=list)
    _named: dict[Hashable, int] = field(default_factory=dict)
    _operation: int = 0

    def fork(self, weights: Sequence[float]) -> int:
        """One of the outcomes of positive weight (need not be normalised)."""
        possible = [outcome for outcome, weight in enumerate(weights) if weight > 0]
        if len(possible) == 1:
            return possible[0]
        if len(self._taken) < len(self.record):
            outcome = self.record[len(self._taken)]
        else:
            outcome, *others = possible
            self.siblings += [(*self._taken, other) for other in others]
        self._taken.append(outcome)
        self.weight *= weights[outcome] / math.fsum(weights[each] for each in possible)
        return outcome

    def uniform(self, steps: int = FINEST) -> int:
        """A fresh uniform; its handle."""
        self.coarsest = min(self.coarsest, steps)
        self._uniforms.append(_Uniform(steps, 0, steps, self._operation))
        return len(self._uniforms) - 1

    def named(self, name: Hashable, steps: int = FINEST) -> int:
        """The uniform of that name, the same each time it is asked for."""
        if name not in self._named:
            self._named[name] = self.uniform(steps)
        return self._named[name]

    def next_operation(self) -> None:
        """What was asked so far belongs to an operation before."""
        self._operation += 1

    def untouched(self, handle: int) -> bool:
        """Whether nothing is known of it."""
        return self._at(handle).high - self._at(handle).low == self._at(handle).steps

    def below(self, handle: int, threshold: float, *, or_equal: bool = False) -> bool:
        """Whether u < threshold, or u <= threshold; not for a threshold that is no number."""
        if math.isnan(threshold):
            return False
        uniform = self._at(handle)
        scaled = min(max(threshold, -1.0), 2.0) * uniform.steps
        cut = math.floor(scaled) + 1 if or_equal else math.ceil(scaled)
        return self._split(uniform, [cut, uniform.steps]) == 0

    def interval(self, handle: int, ends: Sequence[float]) -> int:
        """Which of the intervals that end at `ends` (rising to 1) holds u: an inverse cumulative distribution."""
        uniform = self._at(handle)
        cuts = [math.ceil(end * uniform.steps) for end in ends]
        return self._split(uniform, [*cuts[:-1], uniform.steps])

    def _at(self, handle: int) -> _Uniform:
        uniform = self._uniforms[handle]
        if self.independent and uniform.renewed != self._operation:
            uniform.low, uniform.high, uniform.renewed = 0, uniform.steps, self._operation
        return uniform

    def _split(self, uniform: _Uniform, cuts: Sequence[int]) -> int:
        """Fork over the parts that the cuts leave of the interval, and keep one."""
        edges = [min(max(cut, uniform.low), uniform.high) for cut in cuts]
        starts = [uniform.low, *edges[:-1]]
        part = self.fork([max(0, end - start) for start, end in zip(starts, edges, strict=True)])
        uniform.low, uniform.high = starts[part], edges[part]
        return part


def every(
    program: Callable[[Path], _Outcome], *, independent: bool = False, most: int = _MOST_PATHS
) -> Iterator[tuple[_Outcome, float]]:
    """Outcomes of `program(path)` with their exact weights, which add up to 1. Raises `NotFollowed` past `most` paths.

    >>> sorted(every(lambda path: path.below(path.uniform(), 0.25)))
    [(False, 0.75), (True, 0.25)]
    """
    pending: list[tuple[int, ...]] = [()]
    seen = 0
    while pending:
        path = Path(pending.pop(), independent)
        outcome = program(path)
        yield outcome, path.weight
        pending += path.siblings
        seen += 1
        if seen > most:
            msg = f"it has more than {most:,} paths"
            raise NotFollowed(msg)
