"""stopping: a decode ends at the first EOS, stop id, stop string or limit, wherever in a block that falls.

Note [Stopping]: greedy requests, so the text is known before its end is. A pilot without any stop shows at which
offset of its block each token falls; the stops are then put on tokens of every offset. What is right follows from the
target-only text (asked in the same run, without stops), cut after its first stop. Where a near tie made a text leave
it, the text is held against itself: whatever it says, it must end at its own first stop. Whether it says the right
thing is for the `greedy` check.

Where a draft is so poor that no text reaches some offset, the prompts are asked again with all ids banned but a few that
the target says often: among so few, target and draft agree often, whatever the draft.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, reproduce
from specverify.checks.stop_requests import (
    OWN,
    Ending,
    detokenizer,
    ended,
    named,
    places_of,
    reference_key,
    rounds,
)
from specverify.records import CheckResult, Finding, FinishReason, Plot, PlotKind, Series, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.checks.stop_requests import Detokenize
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["stopping"]


# --------------------------------------------------------------------------------------------- what the answers show


@dataclass(frozen=True)
class _Judged:
    """One text against the ending that it must have."""

    index: int
    trace: DecodeTrace
    expected: Ending
    left_at: int | None
    """The first token that is not the target-only one, or None where it says the same as far as both go."""
    forbidden_eos_at: int | None

    @property
    def right(self) -> bool:
        """Whether it ends where it must, for the right reason."""
        return self._ends_so and self.forbidden_eos_at is None

    @property
    def _ends_so(self) -> bool:
        """Of a text whose last token completes a stop string at the limit, "stop" and "length" are both true."""
        ids, finish, params = self.trace.token_ids, self.trace.finish, self.trace.request.params
        at_limit = bool(params.stop_strings) and len(ids) == params.max_new_tokens and finish is FinishReason.LENGTH
        return Ending(ids, finish) == self.expected or (at_limit and ids == self.expected.token_ids)


def _judged(traces: Sequence[DecodeTrace], detokenize: Detokenize | None) -> list[_Judged]:
    references = {reference_key(one.request): one.token_ids for one in traces if not one.request.speculation}
    judged = []
    for index, trace in enumerate(traces):
        params, ids = trace.request.params, trace.token_ids
        reference = references.get(reference_key(trace.request), ids) if trace.request.speculation else ids
        expected = ended(reference, params, detokenize)
        pairs = enumerate(zip(ids, expected.token_ids, strict=False))
        left_at = next((at for at, (said, wanted) in pairs if said != wanted), None)
        if left_at is not None or expected.finish is None:
            expected = ended(ids, params, detokenize)
        early = (at for at, token in enumerate(ids[: params.min_new_tokens]) if token in params.eos_token_ids)
        judged.append(_Judged(index, trace, expected, left_at, next(early, None)))
    return judged


def _target_alone_last(one: _Judged) -> bool:
    return not one.trace.request.speculation


def _finding(one: _Judged) -> Finding:
    """What was expected, what was emitted, and at which offset the stop fell."""
    trace, expected = one.trace, one.expected
    if one.forbidden_eos_at is not None:
        at = one.forbidden_eos_at
        wrong = f"an EOS is emitted as token {at}, before the minimum of {trace.request.params.min_new_tokens}"
    elif expected.finish is None:
        at = len(trace.token_ids) - 1
        wrong = f"it ends after {at + 1} tokens with neither a stop nor the limit reached"
    else:
        at = len(expected.token_ids) - 1
        extra = len(trace.token_ids) - len(expected.token_ids)
        said = f"{abs(extra)} token(s) too {'many' if extra > 0 else 'few'}" if extra else "the right tokens"
        wrong = f"it must end with '{expected.finish}' at token {at}, but has {said} and says '{trace.finish}'"
    text = f"{wrong}: expected ids {list(expected.token_ids)}, emitted {list(trace.token_ids)}"
    places = places_of(trace.steps)
    where = f", {named(places[at])} of its block" if 0 <= at < len(places) else ""
    arm = "" if trace.request.speculation else " (target alone)"
    return Finding(text=text, place=f"{trace.request.id.removeprefix('stopping/')}{arm}, token {at}{where}")


def _stops_by_place(judged: list[_Judged]) -> Counter[int]:
    """At which offset the stops of right endings fell."""
    return Counter(
        places_of(one.trace.steps)[-1]
        for one in judged
        if one.right and one.trace.steps and one.trace.finish is not FinishReason.LENGTH
    )


def _left(judged: list[_Judged], scored: ScoredTraces) -> tuple[Finding, ...]:
    """Texts that say something else than the target alone before they end: counted, not judged here."""
    left = [one for one in judged if one.left_at is not None]
    if not left:
        return ()
    starts = np.searchsorted(scored["trace"], [one.index for one in left])
    gaps = scored["gap"][starts + [one.left_at or 0 for one in left]]
    text = (
        f"{len(left)} texts leave the target-only text before they end (there at most {gaps.max():.2g} logits below "
        "the target's first choice); each is held against its own first stop, and the greedy check judges what it says"
    )
    return (Finding(text=text, severity=Verdict.PASS, place=left[0].trace.request.id),)


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    judged = _judged(scored.traces, detokenizer(subject))
    on = [one for one in judged if one.trace.request.speculation]
    wrong = tuple(_finding(one) for one in sorted(judged, key=_target_alone_last) if not one.right)
    comparable = sum(one.left_at is None for one in on)
    fell = _stops_by_place(on)
    places = (*range(plan.num_speculative_tokens), OWN)
    known = any(one.trace.steps for one in on)
    missing = [named(place) for place in places if known and not fell[place]]
    verdict = Verdict.FAIL if wrong else Verdict.PASS if comparable and not missing else Verdict.INCONCLUSIVE
    return CheckResult(
        id="stopping",
        claim=stopping.claim,
        verdict=verdict,
        summary=_summary(on, wrong, comparable, missing, known=known),
        findings=(*wrong[:10], *_left(on, scored)),
        measurements={
            "num_texts": len(on),
            "num_wrong_endings": len(wrong),
            "num_not_comparable": len(on) - comparable,
            "num_stop_string_texts": sum(bool(one.trace.request.params.stop_strings) for one in on),
            "num_length_endings": sum(one.trace.finish is FinishReason.LENGTH for one in on),
            **{f"num_stops_at_{'own_token' if place == OWN else f'offset_{place}'}": fell[place] for place in places},
        },
        num_samples=len(on),
        sample_unit="texts",
        smallest_detectable=1.0,
        effect_unit="wrong endings",
        advice=_advice(verdict, missing),
        reproduce=reproduce(subject, plan, "stopping"),
        plots=(_plot(fell, places),) if known else (),
    )


def _summary(on: list[_Judged], wrong: tuple[Finding, ...], comparable: int, missing: list[str], *, known: bool) -> str:
    if not on:
        return "nothing was asked: no prompt leaves room for a text"
    if wrong:
        return f"{len(wrong)} of {len(on)} texts end wrongly; {wrong[0].place}: {wrong[0].text}"
    counted = f"{len(on)} texts end where they must"
    if not comparable:
        return f"{counted}, but none says what the target alone says, so none could be compared with it"
    if missing:
        return f"{counted}, but no stop fell on {', '.join(missing)}"
    at = "at every offset of a block" if known else "at unknown offsets (the engine tells no steps)"
    return f"{counted}: EOS, stops and limits {at}; {len(on) - comparable} could not be compared with the target alone"


def _advice(verdict: Verdict, missing: list[str]) -> str:
    if verdict is Verdict.FAIL:
        return "look for a stop in every token of a step, in order, and drop what follows it before it is emitted"
    if verdict is Verdict.INCONCLUSIVE and missing:
        return "give more prompts, or fewer speculative tokens: no draft that far into a block was accepted at temperature 0"
    return "" if verdict is Verdict.PASS else "mend what the greedy check finds, then ask again"


def _plot(fell: Counter[int], places: tuple[int, ...]) -> Plot:
    return Plot(
        id="stopping/offsets",
        title="Where in a block the stops fell",
        x_label="place in the block",
        y_label="stops",
        kind=PlotKind.BAR,
        series=(Series(label="right endings", x=tuple(map(named, places)), y=tuple(float(fell[p]) for p in places)),),
        caption="A place without a bar was not tested.",
    )


stopping = Check(
    id="stopping",
    claim="a decode ends where it must: at the first EOS, stop or limit, whatever the offset inside a block",
    rounds=rounds,
    conclude=_conclude,
)
"""Deterministic: one wrong ending fails it. INCONCLUSIVE where no stop fell on some offset."""
