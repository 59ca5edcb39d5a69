"""Counters that can't be: what an engine's steps say must add up to its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.records import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specverify.records import DecodeStep, DecodeTrace

__all__ = ["impossible_counters", "nothing_drafted"]

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
