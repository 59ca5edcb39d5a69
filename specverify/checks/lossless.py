"""lossless: over real prompts, the emitted tokens follow the target's own distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.check import Check, Unscored, asked, reproduce, sampling, spread
from specverify.checks.counters import nothing_drafted
from specverify.checks.evidence import (
    EXTENSION,
    detectable_shift,
    e_process,
    e_process_plot,
    e_process_test,
    empty_texts,
    impossible,
    least_level,
    pit_tests,
    positive_statements,
    proof,
    qq_plot,
    support,
    suspicious,
    tokens_needed,
    told_suspicion,
)
from specverify.checks.serial import serial_test
from specverify.records import CheckResult, StatisticalTest, Verdict
from specverify.sampling import probabilities
from specverify.statistics.categorical import chi_square, smallest_detectable_tv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specverify.checks.check import Round
    from specverify.checks.evidence import Support
    from specverify.plan import Plan
    from specverify.records import DecodeRequest, SamplingParams
    from specverify.scoring import ScoredTraces
    from specverify.subject import EncodedPrompt, Subject

__all__ = ["enough", "law_after", "lossless", "lossless_rounds"]


def lossless_rounds(subject: Subject, plan: Plan, *, times: int = 1) -> Iterable[Round]:
    """Rounds over all prompts, a batch of samples each, more than `times` the budget of tokens needs; `enough` ends them."""
    samples = max(1, plan.batch_size // max(1, len(subject.prompts)))
    most = -(-times * plan.lossless_tokens // (samples * len(subject.prompts)))  # a decode emits one token or more
    for number in range(most):
        yield asked(f"lossless/{number}", plan, subject.prompts, sampling(subject, plan), num_samples=samples)


def enough(plan: Plan, scored: ScoredTraces) -> bool:
    """Whether the number of tokens that was fixed before is reached, so that no further round need be asked."""
    return int(_is_stream(scored).sum()) >= plan.lossless_tokens


def _first_token_prompts(subject: Subject, plan: Plan) -> tuple[EncodedPrompt, ...]:
    return spread(subject.prompts, plan.first_token_prompts)


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    params = replace(sampling(subject, plan), max_new_tokens=2)  # two, so that the first is drafted
    prompts = _first_token_prompts(subject, plan)
    yield Unscored(asked("first_token", plan, prompts, params, num_samples=plan.first_token_samples))
    yield from lossless_rounds(subject, plan, times=EXTENSION)


def _is_stream(scored: ScoredTraces) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    of_trace = np.array([request.id.startswith("lossless/") for request in scored.requests()], dtype=bool)
    return of_trace[scored["trace"].astype(np.int64)]


def _stream(scored: ScoredTraces, plan: Plan, *, times: int = 1) -> ScoredTraces:
    """The tokens of the stream, cut at the number that was fixed before."""
    mask = _is_stream(scored)
    return scored.where(mask & (np.cumsum(mask) <= times * plan.lossless_tokens))


def _watched(scored: ScoredTraces, plan: Plan) -> ScoredTraces:
    """The tokens that the e-process has seen: the fixed number, and those after it where that left a suspicion."""
    stream = _stream(scored, plan)
    longer = _stream(scored, plan, times=EXTENSION)
    return longer if len(longer) > len(stream) and suspicious(e_process(stream).log10_e) else stream


def _decided(plan: Plan, scored: ScoredTraces) -> bool:
    """Proof ends it at once; the fixed number ends it without suspicion, ten times that in any case."""
    stream = _watched(scored, plan)
    if not len(stream):
        return False
    if impossible(stream):
        return True
    log10_e = e_process(stream).log10_e
    if log10_e >= proof(plan):
        return True
    return enough(plan, scored) and (not suspicious(log10_e) or len(stream) >= EXTENSION * plan.lossless_tokens)


def _first_token_tests(subject: Subject, plan: Plan, scored: ScoredTraces) -> tuple[StatisticalTest, ...]:
    """Chi-square of the first tokens of many samples of one prompt against the target's exact law."""
    tests = []
    firsts: dict[DecodeRequest, list[int]] = {}
    for trace in scored.traces:
        if trace.request.id.startswith("first_token/") and trace.token_ids:
            firsts.setdefault(trace.request, []).append(trace.token_ids[0])
    for prompt in _first_token_prompts(subject, plan):
        request = next((each for each in firsts if each.id == f"first_token/{prompt.id}"), None)
        if request is None:
            continue
        expected = law_after(subject, prompt, request.params)
        observed = np.bincount(firsts[request], minlength=len(expected))
        outcome = chi_square(observed, expected)
        detectable = smallest_detectable_tv(
            expected, len(firsts[request]), false_fail_rate=least_level(plan), false_pass_rate=plan.false_pass_rate
        )
        tests.append(
            StatisticalTest(
                name=f"first token after {prompt.id}, chi-square",
                statistic=outcome.statistic,
                p_value=outcome.p_value,
                allowed=math.nan,
                failed=False,
                num_samples=len(firsts[request]),
                smallest_detectable=detectable,
            )
        )
    return tuple(tests)


@torch.inference_mode()
def law_after(
    subject: Subject, prompt: EncodedPrompt, params: SamplingParams
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The target's law of the token after a prompt."""
    ids = torch.tensor([prompt.token_ids], device=subject.target.device)
    length = torch.tensor([[ids.shape[1]]], device=ids.device)
    logits = subject.target.logits([prompt.token_ids])[:, -1:]
    law = probabilities(logits, [params], token_ids=ids, prefix_lengths=length, prompt_lengths=length[0])
    return law[0, 0].cpu().numpy()


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    found = support(subject, plan, scored)
    found = replace(found, findings=(*empty_texts(scored), *found.findings))
    stream, watched = _stream(found.inside, plan), _watched(found.inside, plan)
    drafted = sum(step.num_draft_tokens for trace in stream.traces for step in trace.steps)
    tests = (
        *((e_process_test(watched, plan, name="stream"),) if len(watched) else ()),
        *(pit_tests(stream, plan, name="stream") if len(stream) else ()),
        *serial_test(stream, plan, name="stream"),
        *_first_token_tests(subject, plan, scored),
    )
    log10_e = next((test.log10_e for test in tests if test.log10_e is not None), 0.0)
    detectable = detectable_shift(len(stream), plan)
    verdict, summary = _verdict(subject, plan, found, stream, log10_e=log10_e, num_tokens=len(watched), tests=tests)
    return CheckResult(
        id="lossless",
        claim=lossless.claim,
        verdict=verdict,
        summary=summary,
        findings=found.findings,
        tests=tests,
        measurements={"num_drafted_tokens": drafted, "log10_e": log10_e, **positive_statements(stream, plan)},
        num_samples=len(watched),
        smallest_detectable=detectable,
        effect_unit="shift of the mean PIT law",
        advice=_ADVICE if verdict is not Verdict.INCONCLUSIVE or suspicious(log10_e) else "",
        reproduce=reproduce(subject, plan, "lossless"),
        plots=(
            qq_plot(stream),
            e_process_plot(watched, limit=proof(plan)),
        )
        if len(stream)
        else (),
    )


def _verdict(
    subject: Subject,
    plan: Plan,
    found: Support,
    stream: ScoredTraces,
    *,
    log10_e: float,
    num_tokens: int,
    tests: Sequence[StatisticalTest],
) -> tuple[Verdict, str]:
    """Before the judge has held the tests against the budget: proof, too little, or what was seen."""
    wrong = [finding for finding in found.findings if finding.severity is Verdict.FAIL]
    if wrong:
        return Verdict.FAIL, wrong[0].text
    if nothing_drafted(stream.traces):
        return Verdict.INCONCLUSIVE, "nothing was drafted, so nothing was shown"
    if not found.settled:
        return (
            Verdict.INCONCLUSIVE,
            f"{found.findings[-1].text}: too many to say that the support holds; use --dtype float32",
        )
    if suspicious(log10_e):
        seen = f"{num_tokens:,} tokens of {len(subject.prompts)} prompts"
        said = f"evidence 10^{log10_e:.1f} to 1 against the target after {seen}"
        return Verdict.INCONCLUSIVE, told_suspicion(said, log10_e, plan, proven=seen)
    detectable, wanted = detectable_shift(len(stream), plan), plan.largest_undetected_shift
    if detectable > wanted:
        needed = tokens_needed(wanted, plan)
        said = f"too few tokens: a shift of the mean law below {detectable:.2g} would go unseen, {wanted:.2g} is wanted"
        return Verdict.INCONCLUSIVE, f"{said}; set lossless_tokens = {needed} in the plan"
    smallest = min((test.p_value for test in tests if test.p_value is not None), default=1.0)
    return Verdict.PASS, (
        f"{num_tokens:,} tokens of {len(subject.prompts)} prompts: evidence against the target 10^{log10_e:.1f} to 1, "
        f"smallest p-value {smallest:.2g}"
    )


_ADVICE = (
    "the likeliest fault says where to look; run --only exactness to see whether the rule itself is wrong, then compare "
    "the draft's reported law with the one that it samples from"
)

lossless = Check(
    id="lossless",
    claim="over real prompts, emitted tokens follow the target's own distribution",
    rounds=_rounds,
    decided=_decided,
    wanted_tokens=lambda plan: plan.lossless_tokens,
    conclude=_conclude,
)
"""Teacher-forced PIT of every emitted token (KS, chi-square, e-process), and first tokens against the exact law."""
