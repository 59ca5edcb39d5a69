"""Choices that take every path: run a program once a path, all paths of a round in one batch, with exact weights.

Note [Rounds]: a path is the list of its outcomes at the questions that could have gone otherwise. A row replays its list
and then takes the first possible outcome of every further question; each other outcome becomes a path of the next round.
So a round runs all paths with as many departures from "the first possible" as its number says, every path is run exactly
once, and there are at most as many rounds as a path has questions.

Note [Fractions]: where target and draft are simple fractions, so is every probability that a right rule asks about, and a
float64 is near enough to tell which: two fractions with denominators up to a million are 1e-12 apart. So the weight of a
path can be had as the product of the fractions that its factors round, and a law that adds up to the target's *exactly* is
proved, not measured. A factor that is no such fraction is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specverify.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.choices import Stream

__all__ = ["Enumerate", "every_exact_path", "every_path"]

_MOST_DENOMINATOR = 10**6
_ROUNDING = 1e-14
"""How far a float64 may lie from the fraction that it stands for."""
_OPEN = -1
"""What a record holds past its last outcome."""


@dataclass
class _Paths:
    """What the rows of a round have in common, whichever of them still run."""

    weight: Float[Tensor, " paths"]
    taken: Int[Tensor, "paths depth"]
    """The outcomes so far, and after them those that are still to be replayed."""
    num_taken: Int[Tensor, " paths"]
    branches: list[tuple[Int[Tensor, "paths depth"], Int[Tensor, " paths"]]]
    factors: list[tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]] = field(default_factory=list)
    """Paths, and what their weights were multiplied by."""

    def multiply(self, path: Int[Tensor, " rows"], factor: Float[Tensor, " rows"]) -> None:
        """The outcome that each of these paths took had this probability."""
        self.weight[path] *= factor
        self.factors.append((path, factor))


@dataclass(frozen=True)
class Enumerate:
    """Replays each row's recorded outcomes, takes the first possible one where the record ends, and notes the others.

    A row is one path of the program. All rows of a place are answered at once.
    """

    records: Int[Tensor, "paths depth"]
    """The outcomes to replay, -1 past a record's end."""
    begun_at: Int[Tensor, " paths"]
    """Which of the program's starting points each path began at."""
    live: Int[Tensor, " batch"]
    """The path of each row."""
    _paths: _Paths

    @staticmethod
    def start(records: Int[Tensor, "paths depth"], begun_at: Int[Tensor, " paths"]) -> Enumerate:
        """One row a path."""
        weight = torch.ones(len(records), dtype=torch.float64)
        paths = _Paths(weight, records.clone(), torch.zeros(len(records), dtype=torch.int64), [])
        return Enumerate(records, begun_at, torch.arange(len(records)), paths)

    @property
    def weight(self) -> Float[Tensor, " paths"]:
        """The exact probability of each path, given where it began."""
        return self._paths.weight

    def exact_weight(self) -> list[Fraction]:
        """The same as fractions (Note [Fractions]). Raises `InternalError` for a factor that isn't a simple one."""
        weights = [Fraction(1)] * len(self.records)
        for paths, factors in self._paths.factors:
            for path, factor in zip(paths.tolist(), factors.tolist(), strict=True):
                if factor != 1.0:
                    weights[path] *= _fraction(factor)
        return weights

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Enumerate:
        """Every question has a uniform of its own, wherever it is asked."""
        del position, step
        return self

    def select(self, rows: Int[Tensor, " rows"]) -> Enumerate:
        """These rows only. Raises `InternalError` for a repeated row: a path gives one answer at a time."""
        if len(set(rows.tolist())) < len(rows):
            msg = "a path of an enumeration was selected twice; ask for several places of one row instead"
            raise InternalError(msg)
        return replace(self, live=self.live[rows])

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """Forks on accept and reject, wherever both are possible and it matters."""
        del stream, at
        prob = prob.double().clamp(0, 1)
        return self._answer(torch.stack((1 - prob, prob), -1), torch.ones_like(prob).long() if leading else None).bool()

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """Forks on every id of positive probability."""
        del stream, at
        return self._answer(probs.double(), guesses)

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """Forks on every id of positive probability, as `draw` does, even where a race was already run at the position.

        Noise shared by two races would need the joint law of their winners, which is no product of forks. A fork of its
        own proves the loop around a coupled rule (which row is raced, which token is emitted) for every pair of winners;
        that the winners agree as often as they should is not in it.
        """
        del at
        return self._answer(probs.double(), guesses)

    def branches(self) -> tuple[Int[Tensor, "paths depth"], Int[Tensor, " paths"]]:
        """The records of the paths that branched off, and where they began: the next round."""
        depth = self._paths.taken.shape[1]
        noted = [(torch.empty(0, depth, dtype=torch.int64), self.begun_at[:0]), *self._paths.branches]
        records = [torch.nn.functional.pad(taken, (0, depth - taken.shape[1]), value=_OPEN) for taken, _ in noted]
        return torch.cat(records), torch.cat([begun_at for _, begun_at in noted])

    def _answer(
        self, mass: Float[Tensor, "batch n outcomes"], guesses: Int[Tensor, "batch m"] | None
    ) -> Int[Tensor, "batch n"]:
        """Each place in turn; a row whose outcome differs from its guess is asked nothing more, and gets 0.

        Raises `InternalError` where an outcome is asked for and none is possible.
        """
        possible = mass > 0
        laws = mass / mass.sum(-1, keepdim=True)
        first = possible.byte().argmax(-1)  # the first of equal ones
        num_possible = possible.sum(-1)
        answers = torch.zeros_like(first)
        asked = torch.ones(len(mass), dtype=torch.bool)
        for place in range(mass.shape[1]):
            if bool((asked & (num_possible[:, place] == 0)).any()):
                msg = "a token was to be drawn from a row without positive probability"
                raise InternalError(msg)
            outcome = self._fork(possible[:, place], first[:, place], (num_possible[:, place] > 1) & asked)
            weight = laws[:, place].gather(-1, outcome[:, None])[:, 0]
            if guesses is None:
                answers[:, place] = outcome
                self._paths.multiply(self.live, weight)
                continue
            answers[:, place] = torch.where(asked, outcome, 0)
            self._paths.multiply(self.live, torch.where(asked, weight, 1.0))
            if place < guesses.shape[1]:
                asked = asked & (outcome == guesses[:, place])
        return answers

    def _fork(
        self, possible: Bool[Tensor, "batch outcomes"], first: Int[Tensor, " batch"], forks: Bool[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """The recorded outcome where a row forks and has one, the first possible one elsewhere.

        What is certain is not recorded: how often it is asked may depend on the other rows of the batch.
        """
        row = forks.nonzero()[:, 0]
        if not len(row):
            return first
        path = self.live[row]
        depth = self._paths.num_taken[path]
        if int(depth.max()) == self._paths.taken.shape[1]:
            self._paths.taken = torch.nn.functional.pad(self._paths.taken, (0, 4), value=_OPEN)
        recorded = self._paths.taken[path, depth]
        fresh = recorded == _OPEN
        chosen = torch.where(fresh, first[row], recorded)
        self._branch_off(path[fresh], depth[fresh], possible[row[fresh]], chosen[fresh])
        self._paths.taken[path, depth] = chosen
        self._paths.num_taken[path] += 1
        return first.index_put((row,), chosen)

    def _branch_off(
        self,
        path: Int[Tensor, " rows"],
        depth: Int[Tensor, " rows"],
        possible: Bool[Tensor, "rows outcomes"],
        chosen: Int[Tensor, " rows"],
    ) -> None:
        """Note the outcomes that were not chosen."""
        row, other = possible.scatter(1, chosen[:, None], value=False).nonzero(as_tuple=True)
        records = self._paths.taken[path[row]]
        records[torch.arange(len(row)), depth[row]] = other
        self._paths.branches.append((records, self.begun_at[path[row]]))


@lru_cache(maxsize=2**16)
def _fraction(value: float) -> Fraction:
    """The simple fraction that a float64 stands for."""
    nearest = Fraction(value).limit_denominator(_MOST_DENOMINATOR)
    if abs(float(nearest - Fraction(value))) > _ROUNDING:
        msg = f"{value!r} is no fraction with a denominator up to {_MOST_DENOMINATOR:,}"
        raise InternalError(msg)
    return nearest


def every_path(
    program: Callable[[Enumerate], Tensor], *, starts: int = 1, max_paths: int = 1_000_000
) -> Iterator[tuple[Tensor, Float[Tensor, " batch"]]]:
    """Run `program(choices) -> outcomes [batch, ...]` over all of its paths; yields outcomes and their weights.

    The program reads its batch size from `len(choices.records)`, and from `choices.begun_at` at which of `starts` points
    each path begins (a proposal, a prefix). Weights of all paths of a start add up to 1. Raises `InternalError` past `max_paths`.
    """
    for outcomes, choices in _every_round(program, starts, max_paths):
        yield outcomes, choices.weight


def every_exact_path(
    program: Callable[[Enumerate], Tensor], *, starts: int = 1, max_paths: int = 1_000_000
) -> Iterator[tuple[Tensor, list[Fraction]]]:
    """The same with weights as fractions (Note [Fractions])."""
    for outcomes, choices in _every_round(program, starts, max_paths):
        yield outcomes, choices.exact_weight()


def _every_round(
    program: Callable[[Enumerate], Tensor], starts: int, max_paths: int
) -> Iterator[tuple[Tensor, Enumerate]]:
    records, begun_at = torch.empty(starts, 0, dtype=torch.int64), torch.arange(starts)
    seen = 0
    while len(records):
        choices = Enumerate.start(records, begun_at)
        yield program(choices), choices
        seen += len(records)
        if seen > max_paths:
            msg = f"the program has more than {max_paths:,} paths; make the vocabulary or the block smaller"
            raise InternalError(msg)
        records, begun_at = choices.branches()
