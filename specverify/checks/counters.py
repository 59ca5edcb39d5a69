"""What an engine's steps say: which drafts were tested, and counters that can't be, for they must add up to its own tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.records import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from specverify.records import DecodeStep, DecodeTrace
    from specverify.scoring import ScoredTraces

__all__ = ["Tested", "drafts_tested", "impossible_counters", "nothing_drafted"]

_MOST_NAMED = 5


def nothing_drafted(traces: Iterable[DecodeTrace]) -> bool:
    """Whether the steps are known, and none of them drafted."""
    known = False
    for trace in traces:
        if any(step.num_draft_tokens for step in trace.steps):
            return False
        known = known or bool(trace.steps)
    return known


def impossible_counters(traces: Iterable[DecodeTrace]) -> tuple[Finding, ...]:
    """The first steps that contradict the tokens of their own trace, one a trace.

    A step accepts no more than it drafted and emits, and emits one token after the accepted ones. Only a stop may fall
    before that token, in the last step; and an engine may leave out the bonus, so a step that accepts all of its drafts
    may end with them.
    """
    found: list[Finding] = []
    for trace in traces:
        place = f"{trace.request.id}, sample {trace.sample}"
        told = [(at, _wrong(step, last=at == len(trace.steps) - 1)) for at, step in enumerate(trace.steps)]
        emitted = sum(step.num_emitted_tokens for step in trace.steps)
        wrong = [Finding(text=text, place=f"{place}, step {at}") for at, text in told if text]
        if trace.steps and emitted != len(trace.token_ids):
            text = f"its steps emit {emitted} tokens and the text has {len(trace.token_ids)}"
            wrong.append(Finding(text=text, place=place))
        found += wrong[:1]
        if len(found) == _MOST_NAMED:
            break
    return tuple(found)


def _wrong(step: DecodeStep, *, last: bool) -> str:
    """What is wrong with a step, or nothing."""
    drafted, accepted, emitted = step.num_draft_tokens, step.num_accepted_tokens, step.num_emitted_tokens
    says = f"it drafts {drafted}, accepts {accepted} and emits {emitted} tokens"
    if not 0 <= accepted <= drafted:
        return f"{says}: no more can be accepted than was drafted"
    if accepted > emitted:
        return f"{says}: an accepted token that is not emitted was dropped after a stop and doesn't count"
    if emitted > accepted + 1:
        return f"{says}: the target adds one token, not {emitted - accepted}"
    if emitted == accepted < drafted and not last:
        return f"{says}: after a rejection the target must add a token"
    return ""


@dataclass(frozen=True)
class Tested:
    """Every draft that a step accepted or rejected, in order."""

    rows: NDArray[np.int64]
    """Where its position is in the columns of the scored traces."""
    accepted: NDArray[np.bool_]
    places: NDArray[np.int64]
    """Its place in the block, from 0."""


def drafts_tested(scored: ScoredTraces) -> Tested:
    """A step tests each draft that it accepts, and the first that it rejects; what a stop cut off was not tested.

    The tokens before a tested draft are emitted ones, also where it was rejected, so the teacher-forced row at its
    position holds the two laws that it was tested with.
    """
    first_row = np.searchsorted(scored["trace"], np.arange(len(scored.traces)))
    found = array("q")  # three numbers a draft, without an object each
    for start, trace in zip(first_row.tolist(), scored.traces, strict=True):
        at = start
        for step in trace.steps:
            for place in range(step.num_accepted_tokens):
                found.extend((at + place, 1, place))
            if step.num_accepted_tokens < min(step.num_draft_tokens, step.num_emitted_tokens):
                found.extend((at + step.num_accepted_tokens, 0, step.num_accepted_tokens))
            at += step.num_emitted_tokens
    rows, accepted, places = np.frombuffer(found, dtype=np.int64).reshape(-1, 3).T
    return Tested(rows, accepted.astype(bool), places)
