"""stopping: a decode ends at the first EOS, stop id, stop string or limit, wherever in a block that falls.

Note [Stopping]: greedy requests, so the text is known before its end is. A pilot without any stop shows at which
offset of its block each token falls; the stops are then put on tokens of every offset. What is right follows from the
target-only text (asked in the same run, without stops), cut after its first stop. Where a near tie made a text leave
it, the text is held against itself: whatever it says, it must end at its own first stop. Whether it says the right
thing is for the `greedy` check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, asked, reproduce, spread
from specverify.engines import Capability
from specverify.records import CheckResult, Finding, FinishReason, Plot, PlotKind, SamplingParams, Series, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import DecodeRequest, DecodeStep, DecodeTrace
    from specverify.scoring import ScoredTraces
    from specverify.subject import EncodedPrompt, Subject

__all__ = ["stopping"]

_PILOTS = 24
"""Prompts whose texts are searched for stops at every offset."""
_STOPS_PER_PLACE = 3
"""Prompts in which each kind of stop falls at each offset."""
_LEAST_TOKENS = 12
_MOST_LIMITS = 8
_OWN = -1
"""In the place of an offset: the token is the target's own (residual or bonus), not an accepted draft."""

Detokenize = Callable[[Sequence[int]], str]


# ------------------------------------------------------------------------------------------------- what must come out


@dataclass(frozen=True)
class _Ending:
    """Emitted ids and why they end; `finish` is None where the text is too short to reach an end."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None


def _ended(ids: tuple[int, ...], params: SamplingParams, detokenize: Detokenize | None) -> _Ending:
    """`ids` cut where a decode with `params` must end, written independently of the decoder."""
    for place, token in enumerate(ids[: params.max_new_tokens]):
        kept = ids[: place + 1]
        if token in params.eos_token_ids and place >= params.min_new_tokens:
            return _Ending(kept, FinishReason.EOS)
        if token in params.stop_token_ids:
            return _Ending(kept, FinishReason.STOP)
        if params.stop_strings and detokenize and any(stop in detokenize(kept) for stop in params.stop_strings):
            return _Ending(kept, FinishReason.STOP)
    limited = len(ids) >= params.max_new_tokens
    return _Ending(ids[: params.max_new_tokens], FinishReason.LENGTH if limited else None)


def _places(steps: Sequence[DecodeStep]) -> list[int]:
    """For each emitted token its offset among its block's accepted drafts, or `_OWN`."""
    return [
        offset if offset < step.num_accepted_tokens else _OWN
        for step in steps
        for offset in range(step.num_emitted_tokens)
    ]


def _named(place: int) -> str:
    return "the target's own token" if place == _OWN else f"offset {place}"


# ------------------------------------------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class _Text:
    """A text without stops, and the place of each of its tokens."""

    prompt: EncodedPrompt
    token_ids: tuple[int, ...]
    places: tuple[int, ...]

    def first_uses(self) -> list[int]:
        """Positions whose token was not emitted before: a stop on it falls there and nowhere earlier."""
        return [at for at, token in enumerate(self.token_ids) if token not in self.token_ids[:at]]


def _base(plan: Plan) -> SamplingParams:
    """Greedy, without any stop, and long enough for a stop at each offset of a second block."""
    return SamplingParams(temperature=0, max_new_tokens=max(_LEAST_TOKENS, 2 * plan.num_speculative_tokens + 4))


def _pilots(subject: Subject, plan: Plan) -> list[_Text]:
    """What the engine says to the shorter half of the prompts (the cheap half) when nothing stops it."""
    base = _base(plan)
    fitting = [one for one in subject.prompts if len(one.token_ids) + base.max_new_tokens <= subject.target.max_length]
    shorter = sorted(fitting, key=lambda one: len(one.token_ids))[: max(_PILOTS, len(fitting) // 2)]
    prompts = {prompt.id: prompt for prompt in spread(tuple(shorter), _PILOTS)}
    texts = []
    for trace in subject.engine.decode(asked("stopping/pilot", plan, prompts.values(), base)):
        unknown = [at % (plan.num_speculative_tokens + 1) - 1 for at in range(len(trace.token_ids))]
        places = tuple(_places(trace.steps) or unknown)
        texts.append(_Text(prompts[trace.request.prompt_id], trace.token_ids, places))
    return texts


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    texts = _pilots(subject, plan)
    detokenize = _detokenizer(subject)
    minimum = list(_minimum_lengths(texts, plan))
    wanted = [*_at_every_place(texts, plan, detokenize), *_two_in_a_block(texts, plan), *_limits(texts, plan), *minimum]
    if not wanted:
        return
    used = {request.prompt_id for request in wanted}
    references = asked(
        "stopping/off", plan, [t.prompt for t in texts if t.prompt.id in used], _base(plan), speculation=False
    )
    yield (*references, *(replace(request, speculation=False) for request in minimum))
    yield tuple(dict.fromkeys(wanted))


def _ask(text: _Text, plan: Plan, purpose: str, params: SamplingParams) -> DecodeRequest:
    return asked(f"stopping/{purpose}", plan, (text.prompt,), params)[0]


def _at_every_place(texts: list[_Text], plan: Plan, detokenize: Detokenize | None) -> Iterator[DecodeRequest]:
    """An EOS, a stop id and a stop string at each offset of a block, in a few prompts each."""
    base = _base(plan)
    for place in (*range(plan.num_speculative_tokens), _OWN):
        there = ((text, at) for text in texts for at in text.first_uses() if text.places[at] == place)
        one_a_prompt = tuple({text.prompt.id: (text, at) for text, at in there}.values())
        for text, at in spread(one_a_prompt, _STOPS_PER_PLACE):
            token = text.token_ids[at]
            yield _ask(text, plan, f"eos@{at}", replace(base, eos_token_ids=(token,)))
            yield _ask(text, plan, f"stop@{at}", replace(base, stop_token_ids=(token,)))
            for stop in _stop_strings(text.token_ids, at, base, detokenize):
                yield _ask(text, plan, f"string@{at}", replace(base, stop_strings=(stop,)))


def _stop_strings(ids: tuple[int, ...], at: int, base: SamplingParams, detokenize: Detokenize | None) -> Iterator[str]:
    """The text of one token, and one that begins in the token before; those that are completed at `at`, not before."""
    if detokenize is None:
        return
    before, until = detokenize(ids[:at]), detokenize(ids[: at + 1])
    added = until[len(before) :]
    if not until.startswith(before) or not added or "\ufffd" in until:
        return
    straddling = before[-3:] + added[:2] if before else added
    for stop in dict.fromkeys((added, straddling)):
        if _ended(ids, replace(base, stop_strings=(stop,)), detokenize).token_ids == ids[: at + 1]:
            yield stop


def _two_in_a_block(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """An EOS before a stop id, and the other way round, both among one block's drafts: the first decides."""
    base = _base(plan)
    pairs = (
        (text, at)
        for text in texts
        for at in text.first_uses()[:-1]
        if text.places[at] == 0 and at + 1 in text.first_uses()
    )
    for text, at in spread(tuple({text.prompt.id: (text, at) for text, at in pairs}.values()), _STOPS_PER_PLACE):
        first, second = ((token,) for token in text.token_ids[at : at + 2])
        yield _ask(text, plan, f"eos@{at},stop@{at + 1}", replace(base, eos_token_ids=first, stop_token_ids=second))
        yield _ask(text, plan, f"stop@{at},eos@{at + 1}", replace(base, eos_token_ids=second, stop_token_ids=first))


def _limits(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """Every length up to g + 3, without a stop, and with one just before, at and just after the limit."""
    least = plan.num_speculative_tokens + 3
    varied = sorted(texts, key=lambda text: -len([at for at in text.first_uses() if at <= least]))[:2]
    for text, kind in zip(varied, ("eos", "stop"), strict=False):
        for limit in spread(tuple(range(1, least + 1)), _MOST_LIMITS):
            short = replace(_base(plan), max_new_tokens=limit)
            yield _ask(text, plan, f"limit={limit}", short)
            for at in sorted({limit - 2, limit - 1, limit} & set(text.first_uses())):
                ids = (text.token_ids[at],)
                params = replace(short, eos_token_ids=ids) if kind == "eos" else replace(short, stop_token_ids=ids)
                yield _ask(text, plan, f"limit={limit},{kind}@{at}", params)


def _minimum_lengths(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """An EOS that the text would say before, and exactly at, the least number of tokens."""
    for text in spread(tuple(text for text in texts if len(text.first_uses()) > 1), _STOPS_PER_PLACE):
        at = next(at for at in text.first_uses() if at > 0)
        for least in (at, at + 1, at + plan.num_speculative_tokens + 1):
            params = replace(_base(plan), eos_token_ids=(text.token_ids[at],), min_new_tokens=least)
            yield _ask(text, plan, f"min={least},eos@{at}", params)


def _detokenizer(subject: Subject) -> Detokenize | None:
    """Ids to text, where the engine takes stop strings and the pair has a tokenizer."""
    if Capability.STOP_STRINGS not in subject.engine.capabilities:
        return None
    if subject.detokenize is not None:
        return subject.detokenize
    if subject.decoder is not None and subject.decoder.detokenize is not None:
        return subject.decoder.detokenize
    if subject.pair is None:
        return None
    tokenizer = subject.pair.target.tokenizer
    return lambda ids: str(tokenizer.decode(list(ids)))


# --------------------------------------------------------------------------------------------- what the answers show


@dataclass(frozen=True)
class _Judged:
    """One text against the ending that it must have."""

    index: int
    trace: DecodeTrace
    expected: _Ending
    left_at: int | None
    """The first token that is not the target-only one, or None where it says the same as far as both go."""
    forbidden_eos_at: int | None

    @property
    def right(self) -> bool:
        """Whether it ends where it must, for the right reason."""
        ending = _Ending(self.trace.token_ids, self.trace.finish)
        return ending == self.expected and self.forbidden_eos_at is None


def _reference_key(request: DecodeRequest) -> tuple[object, ...]:
    """Which target-only text a request is held against: a minimum length changes the text, other stops only cut it."""
    changed = (request.params.min_new_tokens, request.params.eos_token_ids) if request.params.min_new_tokens else ()
    return (request.prompt_id, *changed)


def _judged(traces: Sequence[DecodeTrace], detokenize: Detokenize | None) -> list[_Judged]:
    references = {_reference_key(one.request): one.token_ids for one in traces if not one.request.speculation}
    judged = []
    for index, trace in enumerate(traces):
        params, ids = trace.request.params, trace.token_ids
        reference = references.get(_reference_key(trace.request), ids) if trace.request.speculation else ids
        expected = _ended(reference, params, detokenize)
        pairs = enumerate(zip(ids, expected.token_ids, strict=False))
        left_at = next((at for at, (said, wanted) in pairs if said != wanted), None)
        if left_at is not None or expected.finish is None:
            expected = _ended(ids, params, detokenize)
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
    places = _places(trace.steps)
    where = f", {_named(places[at])} of its block" if 0 <= at < len(places) else ""
    arm = "" if trace.request.speculation else " (target alone)"
    return Finding(text=text, place=f"{trace.request.id.removeprefix('stopping/')}{arm}, token {at}{where}")


def _stops_by_place(judged: list[_Judged]) -> Counter[int]:
    """At which offset the stops of right endings fell."""
    return Counter(
        _places(one.trace.steps)[-1]
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
    judged = _judged(scored.traces, _detokenizer(subject))
    on = [one for one in judged if one.trace.request.speculation]
    wrong = tuple(_finding(one) for one in sorted(judged, key=_target_alone_last) if not one.right)
    comparable = sum(one.left_at is None for one in on)
    fell = _stops_by_place(on)
    places = (*range(plan.num_speculative_tokens), _OWN)
    known = any(one.trace.steps for one in on)
    missing = [_named(place) for place in places if known and not fell[place]]
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
            **{f"num_stops_at_{'own_token' if place == _OWN else f'offset_{place}'}": fell[place] for place in places},
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
        return "give more prompts, or fewer speculative tokens: drafts that far into a block are never accepted here"
    return "" if verdict is Verdict.PASS else "mend what the greedy check finds, then ask again"


def _plot(fell: Counter[int], places: tuple[int, ...]) -> Plot:
    return Plot(
        id="stopping/offsets",
        title="Where in a block the stops fell",
        x_label="place in the block",
        y_label="stops",
        kind=PlotKind.BAR,
        series=(Series(label="right endings", x=tuple(map(_named, places)), y=tuple(float(fell[p]) for p in places)),),
        caption="A place without a bar was not tested.",
    )


stopping = Check(
    id="stopping",
    claim="a decode ends where it must: at the first EOS, stop or limit, whatever the offset inside a block",
    rounds=_rounds,
    conclude=_conclude,
)
"""Deterministic: one wrong ending fails it. INCONCLUSIVE where no stop fell on some offset."""
