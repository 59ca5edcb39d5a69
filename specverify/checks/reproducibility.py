"""reproducibility: the same request with the same seed gives the same tokens, whatever is decoded beside it.

Note [Rounding of draws]: another batch shape moves the logits in their last bits, so the edges of the cumulative
distribution move too, and a uniform that falls between the old and the new edge draws another token. In float32 that
happens about once in 10^4 draws (a few edges move, but a vocabulary has thousands), so a single differing text proves
nothing. How often it happens is measured on the pair itself, and the number of differing requests is held against it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats

from specverify.checks.check import Check, derived_seed, reproduce, sampling, spread
from specverify.checks.evidence import least_level
from specverify.engines import Capability
from specverify.records import (
    CheckResult,
    DecodeRequest,
    Finding,
    Plot,
    PlotKind,
    SamplingParams,
    Series,
    StatisticalTest,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jaxtyping import Float
    from torch import Tensor

    from specverify.checks.check import Round
    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.records import DecodeTrace, FinishReason
    from specverify.scoring import ScoredTraces
    from specverify.subject import EncodedPrompt, Subject

__all__ = ["drawn_otherwise", "reproducibility"]

_PROMPTS = 4
_LENGTHS = (16, 11, 6)
_MEASURED_TEXTS = 4
_MEASURED_TOKENS = 24
_SURPRISING = 1e-3
"""How often a healthy run may end INCONCLUSIVE because rounding was unusually busy."""

Group = list[int]
"""Indices of traces that must be the same."""


# ------------------------------------------------------------------------------------------------------ what is asked


def _request(
    subject: Subject, plan: Plan, prompt: EncodedPrompt, purpose: str, params: SamplingParams
) -> DecodeRequest:
    return DecodeRequest(
        id=f"reproducibility/{purpose}/{prompt.id}",
        prompt_ids=prompt.token_ids,
        params=replace(params, eos_token_ids=subject.eos_token_ids),
        seed=derived_seed(plan.seed, "reproducibility", purpose, prompt.id),
        prompt_id=prompt.id,
        domain=prompt.domain,
    )


def _base(subject: Subject, plan: Plan, prompts: tuple[EncodedPrompt, ...]) -> tuple[DecodeRequest, ...]:
    """Sampled requests of different seeds, lengths and parameters; two seeds share each prompt's first parameters."""
    sampled = sampling(subject, plan, plan.params if plan.params.temperature else SamplingParams())
    requests = []
    for number, prompt in enumerate(prompts):
        params = replace(sampled, max_new_tokens=_LENGTHS[number % len(_LENGTHS)])
        other = replace(
            params, temperature=0.7 + 0.2 * number, top_p=0.9, max_new_tokens=_LENGTHS[-number % len(_LENGTHS)]
        )
        requests += [
            replace(_request(subject, plan, prompt, "first", params), num_samples=1 if number else 2),
            _request(subject, plan, prompt, "second", params),
            _request(subject, plan, prompt, "other", other),
        ]
    return tuple(requests)


def _neighbours(subject: Subject, plan: Plan, prompts: tuple[EncodedPrompt, ...]) -> list[DecodeRequest]:
    """Rows that share nothing with the requests: greedy ones, other parameters, ones that end after a token or have no seed."""
    longest = max(_LENGTHS)
    kinds = {
        "greedy": SamplingParams(temperature=0, max_new_tokens=longest),
        "top_k": SamplingParams(temperature=0.5, top_k=20, max_new_tokens=longest),
        "short": SamplingParams(max_new_tokens=1),
    }
    if Capability.UNSEEDED in subject.engine.capabilities:
        kinds["unseeded"] = SamplingParams(max_new_tokens=longest)
    requests = [_request(subject, plan, prompt, kind, params) for prompt in prompts for kind, params in kinds.items()]
    return [replace(one, seeded=not one.id.startswith("reproducibility/unseeded")) for one in requests]


def _in_arm(arm: str, requests: Iterable[DecodeRequest]) -> tuple[DecodeRequest, ...]:
    """The same requests under the name of an arm, so that each arm is asked and not recalled."""
    return tuple(replace(request, id=f"{request.id}/{arm}") for request in requests)


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    if Capability.SEED not in subject.engine.capabilities:
        return
    room = subject.target.max_length - max(_LENGTHS)
    fitting = sorted((one for one in subject.prompts if len(one.token_ids) <= room), key=lambda one: len(one.token_ids))
    chosen = spread(tuple(fitting[: max(2 * _PROMPTS, len(fitting) // 2)]), 2 * _PROMPTS)
    base = _base(subject, plan, chosen[::2])
    if not base:
        return
    for request in (base[0], base[-1]):
        yield _in_arm("alone", (request,))
    yield _in_arm("together", base)
    neighbours = _neighbours(subject, plan, chosen[1::2])
    mixed = [one for pair in zip(base[::-1], neighbours, strict=False) for one in pair[::-1]]
    rest = [*base[::-1][len(neighbours) :], *neighbours[len(base) :]]
    yield _in_arm("among others", (*mixed, *rest, *_in_arm("twin", base[:2])))
    yield _in_arm("again", base)


# --------------------------------------------------------------------------------------------- what the answers show


def _same_requests(traces: Sequence[DecodeTrace]) -> list[Group]:
    """Traces of the same request and sample, however it was named; only what was asked more than once."""
    groups: dict[tuple[DecodeRequest, int], Group] = {}
    for index, trace in enumerate(traces):
        groups.setdefault((replace(trace.request, id=""), trace.sample), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _other_seeds(groups: list[Group], traces: Sequence[DecodeTrace]) -> list[tuple[DecodeTrace, DecodeTrace, int]]:
    """Pairs of answers that share everything but the seed (or the sample), and where the first one stands."""
    first = [(traces[group[0]], group[0]) for group in groups]
    return [
        (one, other, at)
        for (one, at), (other, _) in combinations(first, 2)
        if one.request.prompt_ids == other.request.prompt_ids
        and one.request.params == other.request.params
        and (one.request.seed, one.sample) != (other.request.seed, other.sample)
    ]


def drawn_otherwise(first: Float[Tensor, "n vocab"], second: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    """How often one uniform's inverse CDF gives different ids under two laws: 1 - the overlap of their intervals."""
    above = [law.double().cumsum(-1) / law.double().sum(-1, keepdim=True) for law in (first, second)]
    below = [torch.nn.functional.pad(edges[:, :-1], (1, 0)) for edges in above]
    shared = (torch.minimum(*above) - torch.maximum(*below)).clamp(min=0)
    return (1 - shared.sum(-1)).clamp(min=0)


@torch.inference_mode()
def _moved(model: LanguageModel, texts: list[list[int]], chunk: int) -> float:
    """Mean of `drawn_otherwise` between one pass and a cache, token by token and in chunks: legitimate shapes."""
    whole = model.logits(texts)[:, 1:].double().softmax(-1)
    ids = torch.tensor([text[1:] for text in texts], device=model.device)
    rates = []
    for block in {1, chunk}:
        session, parts = model.open([text[:1] for text in texts]), []
        for start in range(0, ids.shape[1], block):
            part = ids[:, start : start + block]
            parts.append(session.append(part, torch.full((len(texts),), part.shape[1], device=model.device)))
        cached = torch.cat(parts, 1).double().softmax(-1)
        rates.append(drawn_otherwise(cached.flatten(0, 1), whole.flatten(0, 1)).mean())
    return float(torch.stack(rates).mean())


def _rounding_rate(subject: Subject, plan: Plan, traces: Sequence[DecodeTrace]) -> float:
    """How often rounding changes a token, at most: one draft draw, one acceptance and one draw of the target's a token.

    An acceptance moves by less than a draw does, and a residual by as much as target and draft together.
    """
    longest_first = sorted({trace.request.prompt_ids + trace.token_ids for trace in traces}, key=len, reverse=True)
    chosen = longest_first[:_MEASURED_TEXTS]
    length = min((len(text) for text in chosen), default=0)
    if length <= 1:
        return 0.0
    texts = [list(text[-min(length, _MEASURED_TOKENS) :]) for text in chosen]
    target = _moved(subject.target, texts, plan.num_speculative_tokens + 1)
    draft = _moved(subject.draft, texts, 1) if subject.draft is not None else target
    return 2 * (target + draft)


def _difference(group: Group, scored: ScoredTraces) -> tuple[str, str, bool] | None:
    """The first answer that is not the group's first: what differs, where, and whether rounding can be the cause."""
    first = scored.traces[group[0]]
    for index in group[1:]:
        other = scored.traces[index]
        if _answer(first) == _answer(other):
            continue
        pairs = enumerate(zip(first.token_ids, other.token_ids, strict=False))
        at = next((at for at, (one, another) in pairs if one != another), None)
        arms = f"'{_arm(first)}' against '{_arm(other)}'"
        place = f"{first.request.id.rsplit('/', 1)[0]}, sample {first.sample}, seed {first.request.seed}"
        if at is None:
            text = f"{arms}: the same tokens end as '{first.finish}' after {len(first.token_ids)} and as "
            return f"{text}'{other.finish}' after {len(other.token_ids)}", place, False
        one, another = (_token(scored, trace, at) for trace in (group[0], index))
        return f"{arms}: token {at} is {one} and {another}", place, True
    return None


def _answer(trace: DecodeTrace) -> tuple[tuple[int, ...], FinishReason]:
    return trace.token_ids, trace.finish


def _arm(trace: DecodeTrace) -> str:
    return trace.request.id.rsplit("/", 1)[1]


def _token(scored: ScoredTraces, trace: int, at: int) -> str:
    index = int(np.searchsorted(scored["trace"], trace)) + at
    return f"{int(scored['token'][index])} (probability {scored['prob'][index]:.2g})"


def _rounding_test(num_differing: int, expected: float, num_groups: int, plan: Plan) -> StatisticalTest:
    """Requests with differing answers against what rounding explains (Poisson, the rate an upper bound)."""
    least = int(stats.poisson.isf(least_level(plan), expected)) + 1
    return StatisticalTest(
        name="differing requests against the measured rounding",
        statistic=num_differing,
        p_value=float(stats.poisson.sf(num_differing - 1, expected)) if num_differing else 1.0,
        allowed=float("nan"),
        failed=False,
        num_samples=num_groups,
        smallest_detectable=float(least),
        effect_unit="differing requests",
    )


def _seeds_test(pairs: list[tuple[DecodeTrace, DecodeTrace, int]], scored: ScoredTraces) -> StatisticalTest:
    """Other seeds must say other things: the chance that an independent sample is this very text, over all pairs.

    If two independent samples of a law agree on x then its probability is at most c with chance sum of P(x)^2 over
    P(x) <= c, which is at most c: so the probability of the shared text is a p-value.
    """
    chances = [1.0]
    for one, other, index in pairs:
        if one.token_ids == other.token_ids:
            start = int(np.searchsorted(scored["trace"], index))
            chances.append(float(np.prod(scored["prob"][start : start + len(one.token_ids)])))
    return StatisticalTest(
        name="texts of different seeds that agree",
        statistic=len(chances) - 1,
        p_value=min(1.0, min(chances) * max(1, len(pairs))),
        allowed=float("nan"),
        failed=False,
        num_samples=len(pairs),
        smallest_detectable=1.0,
        effect_unit="pair that agrees, if its text is unlikely enough",
    )


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    if Capability.SEED not in subject.engine.capabilities:
        summary = "the engine takes no seed, so nothing can be asked twice"
        return CheckResult(id="reproducibility", claim=reproducibility.claim, verdict=Verdict.NOT_RUN, summary=summary)
    traces = scored.traces
    groups = _same_requests(traces)
    differences = [found for group in groups if (found := _difference(group, scored)) is not None]
    rate = _rounding_rate(subject, plan, traces)
    tokens = sum((len(group) - 1) * max(len(traces[index].token_ids) for index in group) for group in groups)
    rounding = _rounding_test(len(differences), max(rate * tokens, 1e-12), len(groups), plan)
    pairs = _other_seeds(groups, traces)
    steps = [step for trace in traces if trace.request.speculation for step in trace.steps]
    drafted = not steps or any(step.num_draft_tokens for step in steps)
    verdict = _verdict(differences, rounding, asked=bool(groups) and drafted)
    return CheckResult(
        id="reproducibility",
        claim=reproducibility.claim,
        verdict=verdict,
        summary=_summary(differences, rounding, rate * tokens, drafted=drafted),
        findings=tuple(
            Finding(text=text, place=place, severity=Verdict.FAIL if not token else _severity(verdict))
            for text, place, token in differences[:10]
        ),
        tests=(rounding, _seeds_test(pairs, scored)) if groups else (),
        measurements={
            "num_requests": len(groups),
            "num_answers": sum(map(len, groups)),
            "num_differing_requests": len(differences),
            "num_expected_by_rounding": rate * tokens,
            "rounding_rate_per_token": rate,
            "num_pairs_of_seeds": len(pairs),
        },
        num_samples=len(groups),
        sample_unit="requests",
        smallest_detectable=rounding.smallest_detectable,
        effect_unit="differing requests",
        advice=_advice(verdict, differences),
        plots=(_plot(groups, traces),) if groups else (),
        reproduce=reproduce(subject, plan, "reproducibility"),
    )


def _plot(groups: Sequence[Group], traces: Sequence[DecodeTrace]) -> Plot:
    """By what a request was asked among: its answers beside the first that it was given."""
    counts: dict[str, list[int]] = {}
    for first, *others in groups:
        for index in others:
            differs = _answer(traces[index]) != _answer(traces[first])
            counts.setdefault(_arm(traces[index]), [0, 0])[differs] += 1
    return Plot(
        id="reproducibility/arms",
        title="Answers to a request that was asked before",
        x_label="asked",
        y_label="answers",
        kind=PlotKind.BAR,
        series=tuple(
            Series(label=label, x=tuple(counts), y=tuple(float(each[place]) for each in counts.values()))
            for place, label in enumerate(("the same answer", "another answer"))
        ),
        caption="Another answer in one group of bars alone says what moves a text: the neighbours, or nothing but the time.",
    )


def _verdict(differences: list[tuple[str, str, bool]], rounding: StatisticalTest, *, asked: bool) -> Verdict:
    """What needs no error budget; the judge fails what rounding can't explain."""
    if any(not by_rounding for _, _, by_rounding in differences):
        return Verdict.FAIL
    unlikely = rounding.p_value is not None and rounding.p_value < _SURPRISING
    blind = (rounding.smallest_detectable or 0) > rounding.num_samples
    return Verdict.INCONCLUSIVE if not asked or (differences and (unlikely or blind)) else Verdict.PASS


def _severity(verdict: Verdict) -> Verdict:
    return Verdict.PASS if verdict is Verdict.PASS else Verdict.INCONCLUSIVE


def _summary(
    differences: list[tuple[str, str, bool]], rounding: StatisticalTest, expected: float, *, drafted: bool
) -> str:
    if not drafted:
        return "nothing was drafted, so nothing was shown"
    if not differences:
        asked = f"{rounding.num_samples} sampled requests, alone, together, among others and again"
        return f"{asked}: the same tokens each time"
    seen = (
        f"{len(differences)} of {rounding.num_samples} requests do not give the same tokens each time (measured "
        f"rounding explains {expected:.2g}, the check fails from {rounding.smallest_detectable:.0f})"
    )
    return f"{seen}; {differences[0][1]}, {differences[0][0]}"


def _advice(verdict: Verdict, differences: list[tuple[str, str, bool]]) -> str:
    if not differences:
        return "" if verdict is Verdict.PASS else "find out why nothing is drafted, or give shorter prompts"
    if verdict is Verdict.PASS:
        return ""
    return (
        "key every random number by the request and the position, not by the row, the batch or what was drawn before; "
        "in half precision ask again with --dtype float32, where rounding explains next to nothing"
    )


reproducibility = Check(
    id="reproducibility",
    claim="the same request with the same seed gives the same tokens, alone or among any neighbours",
    rounds=_rounds,
    conclude=_conclude,
)
"""Sampled requests, asked alone, in one batch, among other neighbours, and again; other seeds must say other things."""
