"""Choices that take every path: run a program once a path, all paths of a round in one batch, with exact weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specverify.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.choices import Stream

__all__ = ["Enumerate", "every_path"]


@dataclass
class Enumerate:
    """Replays each row's recorded outcomes, takes the first possible one where the record ends, and notes the others.

    A row is one path of the program. `weight` is the exact probability of the path (float64); `siblings` are the
    records of the paths that branched off, to be replayed in the next round.
    """

    records: list[tuple[int, ...]]
    weight: Float[Tensor, " paths"] = field(init=False)
    siblings: list[tuple[int, ...]] = field(init=False, default_factory=list)
    live: Int[Tensor, " batch"] = field(init=False)
    """The path of each row that still runs."""

    def __post_init__(self) -> None:
        self.weight = torch.ones(len(self.records), dtype=torch.float64)
        self.live = torch.arange(len(self.records))
        self._taken: list[list[int]] = [[] for _ in self.records]

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Enumerate:
        """Every question has a uniform of its own, wherever it is asked."""
        del position, step
        return self

    def select(self, rows: Int[Tensor, " rows"]) -> Enumerate:
        """The other paths have ended."""
        self.live = self.live[rows]
        return self

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """Forks on accept and reject, wherever both are possible and it matters."""
        del stream, at
        prob = prob.double().clamp(0, 1)
        return self._fork(torch.stack((1 - prob, prob), -1), torch.ones_like(prob).long() if leading else None).bool()

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
        return self._fork(probs.double(), guesses)

    def _fork(
        self, mass: Float[Tensor, "batch n outcomes"], guesses: Int[Tensor, "batch n"] | None
    ) -> Int[Tensor, "batch n"]:
        laws = mass / mass.sum(-1, keepdim=True)
        drawn = torch.zeros(laws.shape[:-1], dtype=torch.int64)
        matters = torch.zeros_like(drawn, dtype=torch.bool)
        guessed = guesses.tolist() if guesses is not None else None
        for row, (path, places) in enumerate(zip(self.live.tolist(), (laws > 0).tolist(), strict=True)):
            for place, possible in enumerate(places):
                outcome = self._choose(path, possible)
                drawn[row, place], matters[row, place] = outcome, True
                if guessed and place < len(guessed[row]) and outcome != guessed[row][place]:
                    break
        weights = torch.where(matters, laws.gather(-1, drawn[..., None])[..., 0], 1.0)
        self.weight[self.live] *= weights.prod(-1)
        return drawn

    def _choose(self, path: int, possible: list[bool]) -> int:
        """What is certain is not recorded: how often it is asked may depend on the other rows of the batch."""
        outcomes = [outcome for outcome, can_be in enumerate(possible) if can_be]
        if len(outcomes) == 1:
            return outcomes[0]
        taken, record = self._taken[path], self.records[path]
        if len(taken) < len(record):
            outcome = record[len(taken)]
        else:
            outcome, *others = outcomes
            self.siblings += [(*taken, other) for other in others]
        taken.append(outcome)
        return outcome


def every_path(
    program: Callable[[Enumerate], Tensor], *, max_paths: int = 1_000_000
) -> Iterator[tuple[Tensor, Float[Tensor, " batch"]]]:
    """Run `program(choices) -> outcomes [batch, ...]` over all of its paths; yields outcomes and their weights.

    The program reads its batch size from `len(choices.records)`. Weights of all paths add up to 1.
    Raises `InternalError` past `max_paths`.
    """
    pending: list[tuple[int, ...]] = [()]
    seen = 0
    while pending:
        choices = Enumerate(pending)
        outcomes = program(choices)
        yield outcomes, choices.weight
        seen += len(pending)
        if seen > max_paths:
            msg = f"the program has more than {max_paths:,} paths; make the vocabulary or the block smaller"
            raise InternalError(msg)
        pending = choices.siblings
