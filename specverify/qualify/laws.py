"""What a function emits on an instance: every path of it, or many draws; and what it should emit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.errors import PlanError, SpecverifyError, SubjectError
from specverify.qualify.instances import Instance, Prefix, Row, random_instance
from specverify.qualify.noise import Noise, Number
from specverify.qualify.paths import NotFollowed, Path, every
from specverify.qualify.randomness import Drawn, OnPath, Randomness
from specverify.qualify.shapes import Function, Rows, Shape, Step, detect, find_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Observed", "Outcome", "Subject", "Weights", "exact_law", "given", "outcomes", "subject"]


_PROBE = random_instance(3, 2, seed=1)


@dataclass(frozen=True)
class Outcome:
    """One row of one call: what was drafted, and what was emitted."""

    drafted: Prefix
    emitted: Prefix

    @property
    def num_accepted(self) -> int:
        """Drafts before the last token."""
        return len(self.emitted) - 1


Weights = dict[tuple[Outcome, ...], float]
"""Outcomes of the rows of a call, with their probability."""


@dataclass(frozen=True)
class Observed:
    """The law of a call."""

    weights: Weights
    coarsest: int
    """The fewest steps of a uniform that the function asked for."""


@dataclass(frozen=True)
class Subject:
    """A function under test, and how it is called."""

    name: str
    function: Function
    shape: Shape

    def answers(self, step: Step) -> Rows:
        """Ids of each row. Raises `SubjectError` for an answer that is none, or where it breaks."""
        try:
            rows = self.shape.call(self.function, step)
        except (NotFollowed, PlanError, SubjectError):
            raise
        except Exception as error:
            if any(name in str(error) for name in (Noise.__name__, Number.__name__)):
                msg = f"a random number that wasn't drawn doesn't go into what it calls: {error}"
                raise NotFollowed(msg) from error
            msg = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise SubjectError(msg) from error
        for ids, drafted, count in zip(rows, step.token_ids.tolist(), step.num_draft_tokens.tolist(), strict=True):
            if not 1 <= len(ids) <= count + 1 or not all(0 <= token < step.target_probs.shape[-1] for token in ids):
                msg = f"it emitted {ids} for the {count} draft(s) {drafted[:count]}"
                raise SubjectError(msg)
            if ids[:-1] != drafted[: len(ids) - 1]:
                msg = f"it emitted {ids}, whose first {len(ids) - 1} are not the drafts {drafted[:count]}"
                raise SubjectError(msg)
        return rows


def subject(name: str, function: Function, shape: str | None = None) -> Subject:
    """The function with the shape of that name, or with the one that its parameters say. Raises `PlanError`."""
    found = Subject(name, function, find_shape(shape) if shape else detect(function))
    if shape is None and found.shape.name == "plain":
        probe = _step([_PROBE], [_PROBE.num_drafts], found, Drawn(0), torch.float64)
        try:
            found.answers(probe)
        except SpecverifyError:
            other = replace(found, shape=find_shape("plain-batch"))
            try:
                other.answers(probe)
            except SpecverifyError:
                return found
            return other
    return found


# ---------------------------------------------------------------------------------------------- laws that are given


@cache
def given(row: Row, dtype: torch.dtype, *, logits: bool) -> tuple[float, ...]:
    """The law that a function is really given: the row rounded to its dtype, then normalised in float64."""
    exact = torch.tensor([float(each) for each in row], dtype=torch.float64)
    seen = exact.log().to(dtype).double().softmax(-1) if logits else exact.to(dtype).double()
    return tuple((seen / seen.sum()).tolist())


# ---------------------------------------------------------------------------------------------- every path


def exact_law(
    subject: Subject,
    instances: Sequence[Instance],
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    independent: bool = False,
    deterministic: bool = False,
) -> Observed:
    """The law of one call with a row for each instance, exactly; `lengths` are the rows' numbers of drafts.

    Raises `NotFollowed` where the function's randomness can't be followed, `SubjectError` where it breaks.
    """
    counts = [each.num_drafts for each in instances] if lengths is None else list(lengths)

    def program(path: Path) -> tuple[tuple[Outcome, ...], Path]:
        return outcomes(subject, instances, counts, OnPath(path), dtype=dtype, deterministic=deterministic), path

    weights: defaultdict[tuple[Outcome, ...], float] = defaultdict(float)
    paths: list[Path] = []
    for (outcome, path), weight in every(program, independent=independent):
        weights[outcome] += weight
        paths.append(path)
    if any(counts) and any(path.handed_out for path in paths) and not any(path.looked_at for path in paths):
        msg = "random numbers went in and nothing in torch looked at them, as with a compiled kernel"
        raise NotFollowed(msg)
    return Observed(dict(weights), min(path.coarsest for path in paths))


def outcomes(
    subject: Subject,
    instances: Sequence[Instance],
    lengths: Sequence[int],
    randomness: Randomness,
    *,
    dtype: torch.dtype = torch.float64,
    deterministic: bool = False,
) -> tuple[Outcome, ...]:
    """One call, or one a row where the shape takes one: draft, ask, and read the answers."""
    step = _step(instances, lengths, subject, randomness, dtype)
    step = replace(step, deterministic=deterministic)
    with randomness.entered():
        if subject.shape.batched or len(instances) == 1:
            rows = subject.answers(step)
        else:
            rows = [subject.answers(step.row(place))[0] for place in range(len(instances))]
    drafted = [tuple(ids[:count]) for ids, count in zip(step.token_ids.tolist(), lengths, strict=True)]
    return tuple(Outcome(ids, tuple(row)) for ids, row in zip(drafted, rows, strict=True))


def _step(
    instances: Sequence[Instance],
    lengths: Sequence[int],
    subject: Subject,
    randomness: Randomness,
    dtype: torch.dtype,
) -> Step:
    logits, longest = subject.shape.logits, max(lengths, default=0)
    vocab = instances[0].vocab_size
    choices = randomness.choices(len(instances))
    drafts: list[Prefix] = [()] * len(instances)
    for place in range(longest):
        laws = [
            given(instance.draft[prefix], dtype, logits=logits) if place < count else _point(vocab)
            for instance, prefix, count in zip(instances, drafts, lengths, strict=True)
        ]
        probs = torch.tensor(laws, dtype=torch.float64)[:, None]
        ids = choices.draw(probs, stream=Stream.DRAFT, at=torch.tensor([place]))[:, 0].tolist()
        drafts = [(*ids_so_far, token) for ids_so_far, token in zip(drafts, ids, strict=True)]
    draft_rows = [
        [_floats(one.draft[ids[:place]]) if place < count else (0.0,) * vocab for place in range(longest)]
        for one, ids, count in zip(instances, drafts, lengths, strict=True)
    ]
    target_rows = [
        [_floats(one.target[ids[: min(place, count)]]) for place in range(longest + 1)]
        for one, ids, count in zip(instances, drafts, lengths, strict=True)
    ]
    return Step(
        token_ids=torch.tensor(drafts, dtype=torch.int64).reshape(len(instances), longest),
        num_draft_tokens=torch.tensor(list(lengths)),
        draft_probs=torch.tensor(draft_rows, dtype=torch.float64).reshape(len(instances), longest, vocab).to(dtype),
        target_probs=torch.tensor(target_rows, dtype=torch.float64).to(dtype),
        randomness=randomness,
    )


@cache
def _floats(row: Row) -> tuple[float, ...]:
    return tuple(float(each) for each in row)


def _point(vocab_size: int) -> tuple[float, ...]:
    """A law with one outcome, for a place that nothing is drafted at."""
    return (1.0,) + (0.0,) * (vocab_size - 1)
