"""Cells on what one request leaves behind for another: neighbours, prefix caches, the end of the context."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, cycle
from typing import TYPE_CHECKING

import numpy as np

from specverify.conformance.asking import Seen, cell, law_tests, wrong_greedy_tokens
from specverify.engines import Capability
from specverify.errors import SubjectError, UsageError
from specverify.records import DecodeRequest, Finding, FinishReason, SamplingParams, Verdict

if TYPE_CHECKING:
    from specverify.conformance.asking import Asking
    from specverify.records import DecodeTrace
    from specverify.scoring import ScoredTraces

__all__ = ["context", "neighbours", "prefix_cache"]

_BATCHES = (1, 2, 3, 5, 8, 16, 40)
"""Requests handed over together: one, few, as many as there are slots, more."""
_LENGTHS = (16, 5, 7, 1, 12, 3)
_TEMPERATURES = (1.0, 0.3, 1.5)
"""Of sampled requests in turn, so that none can do with its neighbour's."""
_TURNS = 12
_OVER = 8
"""Positions past the end of the context."""


# --------------------------------------------------------------------------------------------------------- neighbours


def _batch(asking: Asking, size: int) -> list[DecodeRequest]:
    """Greedy and sampled at several temperatures, seeded and not, some ending early, every fifth a double of the one before."""
    temperatures = cycle(_TEMPERATURES if "temperature" in asking.subject.engine.parameters else _TEMPERATURES[:1])
    unseeded = Capability.UNSEEDED in asking.subject.engine.capabilities
    prompts, usual = asking.subject.prompts, SamplingParams(eos_token_ids=asking.subject.eos_token_ids)
    requests: list[DecodeRequest] = []
    for place in range(size):
        doubled = place % 5 == 3
        params = replace(usual, max_new_tokens=_LENGTHS[0 if doubled else place % len(_LENGTHS)])
        params = replace(params, temperature=next(temperatures) if place % 3 else 0)
        if requests and place % 5 == 4:
            before = requests[-1]
            requests.append(replace(before, id=f"{before.id}, double"))
            continue
        prompt = prompts[(size + place) % len(prompts)]
        number = 4 if doubled and not params.greedy else 1
        request = asking.request(prompt.token_ids, params, name=f"batch={size}/{place}", num_samples=number)
        requests.append(replace(request, seeded=not unseeded or params.greedy or place % 4 == 1))
    return requests


def _look_at_neighbours(asking: Asking) -> Seen:
    traces: list[DecodeTrace] = []
    wrong: list[Finding] = []
    for size in _BATCHES:
        for again in range(1 if size > 5 else 4):
            asked = [replace(one, id=f"{one.id}/{again}") for one in _batch(asking, size)]
            if again:
                turned = [*asked[again:], *asked[:again]]  # each in another row
                asked = [replace(one, seed=one.seed + again) for one in (turned if again < 3 else turned[::-1])]
            traces += asking.answers(asked)
    scored = asking.scored(traces)
    wrong += _wrong_doubles(scored, rate=asking.plan.false_fail_rate)
    wrong += wrong_greedy_tokens(asking, scored, what="among its neighbours")
    outside, tests = law_tests(asking, scored, name="sampled rows among others")
    greedy = sum(trace.request.params.greedy for trace in traces)
    return Seen(
        summary=f"{len(traces)} texts ({greedy} greedy, the others sampled) in batches of {', '.join(map(str, _BATCHES))}: "
        "each says what the target says to it",
        wrong=(*wrong, *outside),
        tests=tests,
        num_samples=len(scored),
        advice="ask the first request that differs alone: if it is right there, look at what rows of a batch share",
    )


def _wrong_doubles(scored: ScoredTraces, *, rate: float) -> list[Finding]:
    """Asked twice at once: at temperature 0 two answers end alike; two samples, or two without a seed, are no doubles.

    Unless chance makes one: another answer says the same with the probability of these tokens under the target. All of
    them together are allowed the square of the run's rate, so its budget need not reckon with them.
    """
    found = []
    with np.errstate(divide="ignore"):  # a token that the target never says
        chances = np.bincount(scored["trace"].astype(np.int64), np.log(scored["prob"]), len(scored.traces))
    allowed = np.log(rate**2 / len(scored.traces))
    answers: defaultdict[str, list[tuple[DecodeTrace, float]]] = defaultdict(list)
    for trace, chance in zip(scored.traces, chances, strict=True):
        answers[trace.request.id.replace(", double", "")].append((trace, chance))
    for (one, chance), (other, _) in (pair for each in answers.values() for pair in combinations(each, 2)):
        if one.token_ids != other.token_ids:
            continue
        if one.request.params.greedy and one.finish is not other.finish:
            text = f"the same tokens end as '{one.finish}' and, asked twice in one batch, as '{other.finish}'"
            found.append(Finding(text=text, place=one.request.id))
        if chance < allowed and (one.sample != other.sample or not one.request.seeded):
            samples = one.request.id == other.request.id
            both = (
                f"samples {one.sample} and {other.sample} of one request"
                if samples
                else "both answers to a request without a seed"
            )
            text = f"{both} are {list(one.token_ids)}"
            found.append(Finding(text=text, place=one.request.id))
    return found


# ------------------------------------------------------------------------------------------------------- prefix cache


def _look_at_prefix_cache(asking: Asking) -> Seen:
    """The second turn right after the first; and one that leaves the first turn's answer at its last token."""
    usual = SamplingParams(temperature=0, max_new_tokens=10, eos_token_ids=())
    eos = set(asking.subject.eos_token_ids)
    ordinary = [token for token in range(asking.subject.target.vocab_size) if token not in eos]
    traces: list[DecodeTrace] = []
    for prompt in asking.subject.prompts[:_TURNS]:
        (first,) = asking.answers([asking.request(prompt.token_ids, usual, name=f"{prompt.id}/turn=1")])
        answer = tuple(token for token in first.token_ids if token not in eos)
        other = ordinary[(answer[-1] + 1) % len(ordinary)] if answer else ordinary[0]
        ways = {
            "continued": (*prompt.token_ids, *answer, *prompt.token_ids[:2]),
            "last token changed": (*prompt.token_ids, *answer[:-1], other),
            "two tokens changed": (*prompt.token_ids, *answer[:-2], other, other),
        }
        asked = []
        for name, ids in ways.items():
            asked.append(asking.request(ids, usual, name=f"{prompt.id}/turn=2, {name}"))
            sampled = replace(usual, temperature=1, max_new_tokens=4)
            asked.append(asking.request(ids, sampled, name=f"{prompt.id}/turn=2, {name}, sampled", num_samples=4))
        traces += [first, *(trace for one in asked for trace in asking.answers([one]))]
    scored = asking.scored(traces)
    wrong = wrong_greedy_tokens(asking, scored, what="after a turn whose beginning was cached")
    outside, tests = law_tests(asking, scored, name="second turns")
    return Seen(
        summary=f"{_TURNS} conversations, continued and changed at their last tokens: {len(scored):,} tokens as if cold",
        wrong=(*wrong, *outside),
        tests=tests,
        num_samples=len(scored),
        advice="look at which slots of a finished request are kept: the last one may hold a rejected draft's values",
    )


# ------------------------------------------------------------------------------------------------------------ context


def _look_at_context(asking: Asking) -> Seen:
    """Texts that end at the last position, requests that go past it, and a request afterwards."""
    limit, eos = asking.subject.target.max_length, asking.subject.eos_token_ids
    ordinary = [token for token in range(asking.subject.target.vocab_size) if token not in eos]
    long = [ordinary[(3 * place + place // 7) % len(ordinary)] for place in range(limit)]
    usual = SamplingParams(temperature=0)
    traces: list[DecodeTrace] = []
    wrong: list[Finding] = []
    for left in range(1, asking.plan.num_speculative_tokens + 4):
        request = asking.request(long[: limit - left], replace(usual, max_new_tokens=left), name=f"left={left}")
        (trace,) = asking.answers([request])
        traces.append(trace)
        if len(trace.token_ids) != left or trace.finish is not FinishReason.LENGTH:
            text = f"{left} positions were left and {left} tokens asked, and it ends as '{trace.finish}' after {len(trace.token_ids)}"
            wrong.append(Finding(text=text, place=request.id))
    said = []
    for left in (4, 1):
        request = asking.request(
            long[: limit - left], replace(usual, max_new_tokens=left + _OVER), name=f"over, left={left}"
        )
        said.append(_beyond(asking, request, left, wrong))
    control = asking.request(asking.subject.prompts[0].token_ids, replace(usual, max_new_tokens=8), name="afterwards")
    traces += asking.answers([control])
    scored = asking.scored(traces)
    wrong += wrong_greedy_tokens(asking, scored, what="at the end of the context, or after it")
    return Seen(
        summary=f"right up to position {limit}; {_OVER} past it: {', '.join(dict.fromkeys(said))}; right afterwards",
        wrong=tuple(wrong),
        verdict=Verdict.PASS,
        num_samples=len(scored),
        advice="draft no further than the last position, of the target and of the draft",
    )


def _beyond(asking: Asking, request: DecodeRequest, left: int, wrong: list[Finding]) -> str:
    """What becomes of a request that can't be answered in full."""
    try:
        (trace,) = asking.answers([request])
    except UsageError:
        return "refused"
    except SubjectError as error:
        wrong.append(
            Finding(text=f"a request past the end of the context breaks the engine: {error}", place=request.id)
        )
        return "broke"
    if len(trace.token_ids) > left:
        text = f"{left} positions were left, and {len(trace.token_ids)} tokens were emitted"
        wrong.append(Finding(text=text, place=request.id))
    return f"cut after {len(trace.token_ids)} tokens"


neighbours = cell("neighbours", "what is decoded beside a request changes nothing of what it says", _look_at_neighbours)
"""Mixed greedy and sampled, different lengths, doubles, batches of 1 to 16 and more requests than slots."""
prefix_cache = cell("prefix_cache", "a second turn says warm what it says cold", _look_at_prefix_cache)
context = cell("context", "texts are right up to the last position, and nothing is emitted past it", _look_at_context)
