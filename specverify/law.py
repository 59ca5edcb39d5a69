"""Exact laws on small tables: what the unchanged decoder emits, and what the target alone would emit.

`decoded_law` drives the real loop over every path; `autoregressive_law` is written independently of it, in NumPy, as a
product of conditionals. Where the two agree to 1e-12 the decoder is lossless on that instance, and no statistics enter.

Note [Merging]: at the border of two steps many paths stand at the same prefix. If all that a step depends on is that
prefix, their futures have the same law, so it is enough to run the real loop for one step from each prefix that can be
reached, and to multiply: M[()] = 1, then M[s + block] += M[s] P(block | s) from short prefixes to long ones. A table's
session holds the prefix and nothing else, so merging is exact on tables. It can't see a fault that carries state from one
step to the next (a cache that is rolled back wrongly, a drafter that counts its steps): `merge=False` runs whole decodes.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specverify.choices.enumerate import Enumerate, every_exact_path, every_path
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.models.table import TableModel

__all__ = [
    "Block",
    "Law",
    "autoregressive_law",
    "decoded_law",
    "decoded_laws",
    "exact_step_laws",
    "greedy_law",
    "step_laws",
    "total_variation",
]

Law = dict[tuple[int, ...], float]
"""Emitted ids to probability."""

Place = tuple[int, tuple[int, ...]]
"""Which request, and what has been emitted for it."""

_PROMPT = (0,)


class Block(NamedTuple):
    """What one draft-and-verify step does."""

    token_ids: tuple[int, ...]
    """What it emits."""
    num_accepted_tokens: int
    ends: bool
    """Whether the decode is over."""


def decoded_law(
    decoder: Decoder, *, max_new_tokens: int, eos_token_ids: tuple[int, ...] = (), merge: bool = True
) -> Law:
    """The law of everything that a whole speculative decode emits after the one-token prompt 0, exactly.

    Composed of the laws of single steps, which assumes that a step depends on its prefix alone (Note [Merging]); with
    `merge=False` by running whole decodes, whose number of paths grows with every step.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
    [law] = decoded_laws(decoder, [DecodeRequest(id="law", prompt_ids=_PROMPT, params=params)], merge=merge)
    return law


def decoded_laws(decoder: Decoder, requests: Sequence[DecodeRequest], *, merge: bool = True) -> list[Law]:
    """The law of what is emitted for each request; together they cost little more than one of them."""
    return _composed_laws(decoder, requests) if merge else _unmerged_laws(decoder, requests)


def _unmerged_laws(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[Law]:
    laws: list[Law] = [{} for _ in requests]
    for start, trace, weight in _every_trace(decoder, requests):
        laws[start][trace.token_ids] = laws[start].get(trace.token_ids, 0.0) + weight
    return laws


def _composed_laws(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[Law]:
    """The steps from each prefix that can be reached, then their product along every text."""
    steps: dict[Place, dict[Block, float]] = {}
    new: list[Place] = [(index, ()) for index in range(len(requests))]
    while new:
        begun = [_begun(requests[index], emitted) for index, emitted in new]
        steps |= zip(new, step_laws(decoder, begun), strict=True)
        reached = {
            (index, emitted + block.token_ids): None
            for index, emitted in new
            for block in steps[index, emitted]
            if not block.ends
        }
        new = [place for place in reached if place not in steps]
    standing: dict[Place, float] = {(index, ()): 1.0 for index in range(len(requests))}
    laws: list[Law] = [{} for _ in requests]
    for index, emitted in sorted(steps, key=lambda place: len(place[1])):
        for block, weight in steps[index, emitted].items():
            after, share = emitted + block.token_ids, standing[index, emitted] * weight
            if block.ends:
                laws[index][after] = laws[index].get(after, 0.0) + share
            else:
                standing[index, after] = standing.get((index, after), 0.0) + share
    return laws


def _begun(request: DecodeRequest, emitted: tuple[int, ...]) -> DecodeRequest:
    """The request to go on with what has been said."""
    params = _with_room(request.params, request.params.max_new_tokens - len(emitted))
    return replace(request, prompt_ids=request.prompt_ids + emitted, params=params)


@lru_cache(maxsize=256)
def _with_room(params: SamplingParams, max_new_tokens: int) -> SamplingParams:
    """One object for equal parameters: the loop compares those of every row, and what is the same is compared at once."""
    return replace(params, max_new_tokens=max_new_tokens)


def step_laws(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[dict[Block, float]]:
    """The law of the first step of the unchanged loop for each request, all in one batch."""
    laws: list[dict[Block, float]] = [{} for _ in requests]
    for start, block, weight in _every_step(decoder, requests, every_path):
        laws[start][block] = laws[start].get(block, 0.0) + float(weight)
    return laws


def exact_step_laws(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[dict[Block, Fraction]]:
    """The same in fractions (Note [Fractions] in `choices.enumerate`); the models' laws must be simple ones."""
    laws: list[dict[Block, Fraction]] = [{} for _ in requests]
    for start, block, weight in _every_step(decoder, requests, every_exact_path):
        laws[start][block] = laws[start].get(block, Fraction(0)) + Fraction(weight)
    return laws


def _every_step(
    decoder: Decoder, requests: Sequence[DecodeRequest], paths: Callable[..., Iterator[tuple[Tensor, Any]]]
) -> Iterator[tuple[int, Block, float | Fraction]]:
    one_step = replace(decoder, stop=lambda *step: _ended(decoder.stop(*step)))
    for start, trace, weight in _every_trace(one_step, requests, paths):
        [step] = trace.steps
        yield start, Block(trace.token_ids, step.num_accepted_tokens, trace.finish is not FinishReason.STOP), weight


def _ended(cuts: list[tuple[int, FinishReason | None]]) -> list[tuple[int, FinishReason | None]]:
    """Every row ends with its step; `STOP`, which no request here asks for, marks those that would have gone on."""
    return [(kept, finish or FinishReason.STOP) for kept, finish in cuts]


def _every_trace(
    decoder: Decoder,
    requests: Sequence[DecodeRequest],
    paths: Callable[..., Iterator[tuple[Tensor, Any]]] = every_path,
) -> Iterator[tuple[int, DecodeTrace, Any]]:
    """Every path of the loop from each request: which request, what it did, and its probability."""
    traces: dict[int, DecodeTrace] = {}

    def program(choices: Enumerate) -> Int[Tensor, " paths"]:
        rows = [Row(requests[start], path) for path, start in enumerate(choices.begun_at.tolist())]
        traces.update((trace.sample, trace) for trace in speculative(replace(decoder, choices=lambda _: choices), rows))
        return choices.begun_at

    for starts, weights in paths(program, starts=len(requests)):
        listed = weights if isinstance(weights, list) else weights.tolist()
        for path, (start, weight) in enumerate(zip(starts.tolist(), listed, strict=True)):
            yield start, traces[path], weight


def autoregressive_law(
    target: TableModel,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...] = (),
    prompt_ids: tuple[int, ...] = _PROMPT,
) -> Law:
    """The law of everything that the target alone emits after a prompt: a product of conditionals."""
    law: Law = {(): 1.0}
    for _ in range(max_new_tokens):
        longer: Law = {}
        for emitted, weight in law.items():
            if emitted and emitted[-1] in eos_token_ids:
                longer[emitted] = weight
                continue
            conditional = np.exp(target.row((*prompt_ids, *emitted)).numpy())
            for token, probability in enumerate(conditional / conditional.sum()):
                if probability > 0:
                    longer[*emitted, token] = weight * float(probability)
        law = longer
    return law


def greedy_law(
    target: TableModel,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...] = (),
    prompt_ids: tuple[int, ...] = _PROMPT,
) -> Law:
    """All probability on the text that takes the most probable id everywhere, ties to the lowest."""
    emitted: tuple[int, ...] = ()
    while len(emitted) < max_new_tokens and not (emitted and emitted[-1] in eos_token_ids):
        emitted = (*emitted, int(np.argmax(target.row((*prompt_ids, *emitted)).numpy())))
    return {emitted: 1.0}


def total_variation(first: Mapping[tuple[int, ...], float], second: Mapping[tuple[int, ...], float]) -> float:
    """Half the summed absolute difference."""
    return sum(abs(first.get(ids, 0.0) - second.get(ids, 0.0)) for ids in {*first, *second}) / 2
