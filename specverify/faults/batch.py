"""Requests that change what their neighbours say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.decoding import first_stop
from specverify.faults.fault import Fault
from specverify.faults.parameter import law_of
from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.decoding import Decoder
    from specverify.drafting import Drafter, Drafting
    from specverify.records import SamplingParams
    from specverify.verification import Proposal

__all__ = ["BATCH_FAULTS"]


def _of_first_row(params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    return [params[0]] * len(params)


def _greedy_if_any(params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    return [replace(one, temperature=0) for one in params] if any(one.greedy for one in params) else params


@dataclass(frozen=True)
class _SwapsRequests:
    """When a sequence ends, the first two that go on change their requests, parameters and all."""

    inner: Drafter

    def __call__(self, context: Context) -> Drafting:
        return _Swapping(self.inner(context), len(context.rows))


@dataclass
class _Swapping:
    inner: Drafting
    num_rows: int

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        if 1 < len(context.rows) < self.num_rows:
            context.rows[:2] = context.rows[1::-1]
        self.num_rows = len(context.rows)
        return self.inner.propose(context, max_tokens)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.inner.select(rows)


def _until_all_have_ended(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[tuple[int, FinishReason | None]]:
    """A text that met its EOS goes on while any of its batch does, if that holds more than one request."""
    cuts = first_stop(context, emitted, num_emitted)
    alone = len({row.request for row in context.rows}) == 1  # also every path of an exact law, which has no neighbours
    if alone or all(finish is not None for _, finish in cuts):
        return cuts
    room = (context.limits - context.lengths).tolist()
    whole = [min(count, most) for count, most in zip(num_emitted.tolist(), room, strict=True)]
    return [
        (count, FinishReason.LENGTH if count == most else None) if finish is FinishReason.EOS else (kept, finish)
        for (kept, finish), count, most in zip(cuts, whole, room, strict=True)
    ]


def _with_requests_swapped(decoder: Decoder) -> Decoder:
    return replace(decoder, drafter=_SwapsRequests(decoder.drafter))


BATCH_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="parameters-of-first-row",
        stands_for="the first request's temperature and truncation are used for its whole batch",
        caught_by=("reproducibility", "parameters"),
        apply=lambda decoder: replace(decoder, law=law_of(_of_first_row)),
    ),
    Fault(
        name="greedy-neighbour",
        stands_for="one greedy request makes its whole batch greedy",
        caught_by=("reproducibility",),
        apply=lambda decoder: replace(decoder, law=law_of(_greedy_if_any)),
    ),
    Fault(
        name="requests-swapped",
        stands_for="when a sequence ends, two of those that go on are handed each other's request",
        caught_by=("reproducibility",),
        apply=_with_requests_swapped,
    ),
    Fault(
        name="finished-goes-on",
        stands_for="a sequence that met its EOS goes on until its whole batch has ended",
        caught_by=("stopping",),
        apply=lambda decoder: replace(decoder, stop=_until_all_have_ended),
    ),
)
"""Neighbours."""
