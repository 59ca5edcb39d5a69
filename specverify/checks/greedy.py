"""greedy: at temperature 0, speculation changes no token; a near tie within the measured noise is counted, not hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from specverify.checks.check import Check, asked, reproduce, sampling, spread
from specverify.checks.evidence import least_level
from specverify.checks.noise import Noise, measured_noise
from specverify.checks.self_speculation import self_speculation
from specverify.records import (
    CheckResult,
    Finding,
    Plot,
    PlotKind,
    SamplingParams,
    Series,
    StatisticalTest,
    Verdict,
)
from specverify.statistics.poisson_binomial import poisson_binomial_tail, smallest_detectable_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["greedy"]


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    params = sampling(subject, plan, SamplingParams(temperature=0))
    prompts = spread(subject.prompts, plan.greedy_prompts)
    yield (
        *asked("greedy/on", plan, prompts, params),
        *asked("greedy/off", plan, prompts, params, speculation=False),
    )


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    on = scored.where(_of_arm(scored, speculation=True))
    texts = [trace.request.prompt_ids + trace.token_ids for trace in scored.traces if trace.request.speculation]
    noise = measured_noise(
        subject.target, texts, chunk=plan.num_speculative_tokens + 1, engine_noise=subject.engine_noise
    )
    flips = on["gap"] > 0
    beyond = on["gap"] > noise.allowed_gap
    drafted = sum(step.num_draft_tokens for trace in on.traces for step in trace.steps)
    diverged = _diverged(scored.traces)
    control = self_speculation(subject, plan)
    findings = _wrong_tokens(on, beyond, noise) + control.findings(noise)
    steps_known = any(trace.steps for trace in on.traces)
    nothing = not len(on) or (steps_known and not drafted)
    verdict = Verdict.FAIL if findings else Verdict.INCONCLUSIVE if nothing else Verdict.PASS
    summary = (
        "nothing was drafted, so nothing was shown"
        if nothing and not findings
        else (
            f"{len(on):,} tokens, {int(flips.sum())} not the target's first choice, {int(beyond.sum())} of them beyond the "
            f"measured noise (2B = {noise.allowed_gap:.2g} logits); {diverged} of {_num_pairs(scored.traces)} texts differ from target-only"
        )
    )
    return CheckResult(
        id="greedy",
        claim=greedy.claim,
        verdict=verdict,
        summary=summary,
        findings=findings + _tolerated(on, flips & ~beyond) + _ties(on),
        tests=_noise_tests(plan, on, flips, noise) if len(on) else (),
        measurements={
            "num_flips": int(flips.sum()),
            "num_tolerated_flips": int((flips & ~beyond).sum()),
            "num_suspicious_flips": int((flips & ~beyond & (on["gap"] > noise.suspicious_gap)).sum()),
            "num_wrong_tokens": int(beyond.sum()),
            "num_exact_ties": int((on["margin"] == 0).sum()),
            "num_ties_to_higher_id": int(((on["gap"] == 0) & (on["first_choice"] == 0)).sum()),
            "num_diverged_texts": diverged,
            "noise_largest_logits": noise.largest,
            "noise_of_engine_without_speculation_logits": subject.engine_noise,
            "noise_margin_sd_logits": noise.margin_sd,
            "allowed_gap_logits": noise.allowed_gap,
            "suspicious_gap_logits": noise.suspicious_gap,
            **control.measurements(),
        },
        num_samples=len(on),
        smallest_detectable=noise.allowed_gap,
        effect_unit="logits",
        advice=_advice(nothing=nothing),
        reproduce=reproduce(subject, plan, "greedy"),
        plots=(_plot(on, flips, noise),),
    )


def _of_arm(scored: ScoredTraces, *, speculation: bool) -> NDArray[np.bool_]:
    arm = np.array([trace.request.speculation == speculation for trace in scored.traces], dtype=bool)
    return arm[scored["trace"].astype(np.int64)]


def _by_prompt(traces: Iterable[DecodeTrace], *, speculation: bool) -> dict[str, DecodeTrace]:
    return {trace.request.prompt_id: trace for trace in traces if trace.request.speculation == speculation}


def _num_pairs(traces: Sequence[DecodeTrace]) -> int:
    return len(_by_prompt(traces, speculation=True))


def _diverged(traces: Sequence[DecodeTrace]) -> int:
    """Texts that are not token for token those of the target alone."""
    on, off = (_by_prompt(traces, speculation=arm) for arm in (True, False))
    return sum(on[prompt].token_ids != off[prompt].token_ids for prompt in on if prompt in off)


def _wrong_tokens(on: ScoredTraces, beyond: NDArray[np.bool_], noise: Noise) -> tuple[Finding, ...]:
    findings = []
    for index in np.flatnonzero(beyond)[:10]:
        trace = on.traces[int(on["trace"][index])]
        text = (
            f"token {int(on['token'][index])} is {on['gap'][index]:.3g} logits below the target's first choice "
            f"(allowed {noise.allowed_gap:.2g}, rank {int(on['rank'][index])})"
        )
        place = f"prompt {trace.request.prompt_id}, token {int(on['position'][index])} after it"
        findings.append(Finding(text=text, place=place))
    return tuple(findings)


def _tolerated(on: ScoredTraces, tolerated: NDArray[np.bool_]) -> tuple[Finding, ...]:
    if not tolerated.any():
        return ()
    text = f"{int(tolerated.sum())} near ties went the other way, the widest by {on['gap'][tolerated].max():.2g} logits"
    return (Finding(text=text, severity=Verdict.PASS),)


def _ties(on: ScoredTraces) -> tuple[Finding, ...]:
    """Equal largest logits go to the lowest id; another convention is worth knowing, and no fault."""
    otherwise = int(((on["gap"] == 0) & (on["first_choice"] == 0)).sum())
    if not otherwise:
        return ()
    text = f"{otherwise} of {int((on['margin'] == 0).sum())} exact ties went to another id than the lowest"
    return (Finding(text=text, severity=Verdict.PASS),)


def _noise_tests(plan: Plan, on: ScoredTraces, flips: NDArray[np.bool_], noise: Noise) -> tuple[StatisticalTest, ...]:
    """Flips against what the noise predicts: each margin m flips with probability Phi(-m/s), ties with one half.

    And tokens more than 6s below the first choice, each of which has probability Phi(-6) at most.
    """
    spread = max(noise.margin_sd, 1e-300)
    # a margin of 40s is as good as any: the probability must not be 0, or one flip of an exact model were proof
    flipping = stats.norm.sf(np.minimum(on["margin"] / spread, 37.0))
    suspicious = int((on["gap"] > noise.suspicious_gap).sum())
    observed = int(flips.sum())
    outcomes = {
        "flips against the measured noise": (observed, flipping),
        "tokens more than 6s below the first choice": (suspicious, np.full(len(on), stats.norm.sf(6.0))),
    }
    return tuple(
        StatisticalTest(
            name=name,
            statistic=statistic,
            p_value=poisson_binomial_tail(probs, statistic),
            allowed=float("nan"),
            failed=False,
            num_samples=len(on),
            smallest_detectable=smallest_detectable_share(
                probs, false_fail_rate=least_level(plan), false_pass_rate=plan.false_pass_rate
            ),
            effect_unit="of the tokens",
        )
        for name, (statistic, probs) in outcomes.items()
    )


def _plot(on: ScoredTraces, flips: NDArray[np.bool_], noise: Noise) -> Plot:
    margins = np.sort(on["margin"])
    thinned = margins[np.linspace(0, len(margins) - 1, min(len(margins), 200)).astype(int)] if len(margins) else margins
    shares = np.linspace(0, 1, len(thinned))
    gaps = on["gap"][flips]
    return Plot(
        id="greedy/margins",
        title="Margins of the target, and gaps of divergences",
        x_label="logits",
        y_label="share of tokens with a smaller margin",
        kind=PlotKind.LINE,
        series=(
            Series(label="margin of the target's first choice", x=tuple(thinned.tolist()), y=tuple(shares.tolist())),
            Series(label="gap of a divergence", x=tuple(np.sort(gaps).tolist()), y=tuple([0.5] * len(gaps))),
            Series(label="allowed: 2B", x=(noise.allowed_gap, noise.allowed_gap), y=(0.0, 1.0), dashed=True),
        ),
        caption="A divergence right of the dashed line is larger than any noise that was measured.",
    )


def _advice(*, nothing: bool) -> str:
    if nothing:
        return "find out why nothing is drafted: the engine may have switched speculation off without a word"
    return (
        "a token beyond the noise comes from the cache, the positions or the rule: compare the first wrong token's step "
        "with target-only decoding, and look at what the rollback before it kept"
    )


greedy = Check(
    id="greedy",
    claim="at temperature 0, speculation changes no token",
    rounds=_rounds,
    conclude=_conclude,
)
"""Teacher-forced: every token is held against the target's first choice after the engine's own text, so comparison goes
on after a divergence."""
