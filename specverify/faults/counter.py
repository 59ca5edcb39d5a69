"""Right texts with wrong counters: steps that say more, or less, than was drafted and accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.faults.fault import Fault, unchanged
from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.engines import Capability, Engine
    from specverify.records import DecodeRequest, DecodeStep, DecodeTrace

__all__ = ["COUNTER_FAULTS"]


@dataclass(frozen=True)
class _Recounted:
    """An engine whose steps are told otherwise than they were."""

    inner: Engine
    recount: Callable[[DecodeTrace], Iterator[DecodeStep]]

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    @property
    def parameters(self) -> frozenset[str]:
        return self.inner.parameters

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        for trace in self.inner.decode(requests):
            yield replace(trace, steps=tuple(self.recount(trace)))


def _bonus_accepted(trace: DecodeTrace) -> Iterator[DecodeStep]:
    for step in trace.steps:
        counted = step.num_emitted_tokens if step.num_draft_tokens else 0
        yield replace(step, num_accepted_tokens=counted)


def _accepted_past_stop(trace: DecodeTrace) -> Iterator[DecodeStep]:
    """All drafts of the step in which the text ended count as accepted."""
    *before, last = trace.steps
    yield from before
    stopped = trace.finish is not FinishReason.LENGTH and last.num_accepted_tokens == last.num_emitted_tokens
    yield replace(last, num_accepted_tokens=last.num_draft_tokens) if stopped else last


def _rejected_uncounted(trace: DecodeTrace) -> Iterator[DecodeStep]:
    for step in trace.steps:
        yield replace(step, num_draft_tokens=step.num_accepted_tokens)


def _most_counted(trace: DecodeTrace) -> Iterator[DecodeStep]:
    most = max(step.num_draft_tokens for step in trace.steps)
    for step in trace.steps:
        yield replace(step, num_draft_tokens=most)


def _told(recount: Callable[[DecodeTrace], Iterator[DecodeStep]]) -> Callable[[Engine], Engine]:
    return lambda engine: _Recounted(engine, recount)


COUNTER_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="bonus-counted",
        stands_for="the target's own token is counted as an accepted draft",
        caught_by=("acceptance",),
        apply=unchanged,
        around=_told(_bonus_accepted),
    ),
    Fault(
        name="accepted-past-stop",
        stands_for="drafts that were dropped after an EOS are counted as accepted",
        caught_by=("acceptance",),
        apply=unchanged,
        around=_told(_accepted_past_stop),
    ),
    Fault(
        name="rejected-uncounted",
        stands_for="rejected drafts are not counted as drafted, so that acceptance looks perfect",
        caught_by=("acceptance",),
        apply=unchanged,
        around=_told(_rejected_uncounted),
    ),
    Fault(
        name="configured-drafts-counted",
        stands_for="the configured number of drafts is counted where fewer were drafted",
        caught_by=("acceptance",),
        apply=unchanged,
        around=_told(_most_counted),
    ),
)
"""Counters, not texts."""
