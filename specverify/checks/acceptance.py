"""acceptance: how many drafts the target takes, and whether that is what its law and the draft's say it must be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, reproduce
from specverify.checks.lossless import enough, lossless_rounds
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, StatisticalTest, Verdict, count
from specverify.statistics.acceptance import tokens_per_step
from specverify.statistics.interval import cluster_interval
from specverify.statistics.sequential import bernoulli_bets
from specverify.verification.chain import greedy, sample_and_match

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specverify.plan import Plan
    from specverify.records import DecodeCounters
    from specverify.scoring import ScoredTraces
    from specverify.statistics.interval import Interval
    from specverify.subject import Subject

__all__ = ["acceptance", "boundaries", "tested_positions"]

_MOST_SPECULATIVE_TOKENS = 8
_OTHER_ACCEPTANCE = (sample_and_match, greedy)
"""Rules that accept with another probability than Σ min(p, q)."""
_SURELY = 1e-6
"""Σ min(p, q) is kept this far from 0 and 1: a rounding of the cached logits must not count as proof."""


def tested_positions(scored: ScoredTraces) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of `scored` at which a draft was accepted or rejected, in order, and which it was.

    A step tests each draft that it accepts, and the first that it rejects. What a stop cut off was not tested.
    """
    first_row = np.searchsorted(scored["trace"], np.arange(len(scored.traces)))
    rows: list[int] = []
    flags: list[bool] = []
    for start, trace in zip(first_row.tolist(), scored.traces, strict=True):
        place = start
        for step in trace.steps:
            tested = [True] * step.num_accepted_tokens
            if step.num_accepted_tokens < min(step.num_draft_tokens, step.num_emitted_tokens):
                tested.append(False)
            rows += range(place, place + len(tested))
            flags += tested
            place += step.num_emitted_tokens
    return np.array(rows, dtype=np.int64), np.array(flags, dtype=bool)


def boundaries(scored: ScoredTraces) -> list[int]:
    """Rows at which another transcript begins."""
    changes: list[int] = (np.flatnonzero(np.diff(scored["trace"])) + 1).tolist()
    return changes


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    counters = count(scored.traces)
    known = len(scored["overlap"]) > 0
    if not known or (counters.num_drafts == 0 and any(trace.steps for trace in scored.traces)):
        return _nothing_known(subject, plan, counters)
    expected = cluster_interval(scored["overlap"], scored.prompts())
    findings = _furthest_prompts(scored)
    refused = expected.high < plan.minimum_acceptance
    if refused:
        text = (
            f"expected acceptance {expected.estimate:.3f} is below the plan's minimum of {plan.minimum_acceptance:.3f}"
        )
        findings = (Finding(text=text), *findings)
    per_step = {
        g: tokens_per_step(np.clip(scored["posterior"], 0, 1), g, boundaries(scored))
        for g in range(1, _MOST_SPECULATIVE_TOKENS + 1)
    }
    summary = (
        f"expected acceptance Σ min(p, q) = {expected.estimate:.3f} [{expected.low:.3f}, {expected.high:.3f}], "
        f"{per_step.get(plan.num_speculative_tokens, math.nan):.2f} tokens a step predicted with "
        f"{plan.num_speculative_tokens} drafts; accepted / drafted measured: {counters.acceptance_rate:.3f}"
    )
    return CheckResult(
        id="acceptance",
        claim=acceptance.claim,
        verdict=Verdict.FAIL if refused else Verdict.PASS,
        summary=summary,
        findings=findings,
        tests=_measured_against_expected(subject, scored),
        measurements=_measurements(expected, counters, per_step),
        num_samples=len(scored),
        smallest_detectable=(expected.high - expected.low) / 2,
        effect_unit="acceptance (half width)",
        advice=_ADVICE,
        reproduce=reproduce(subject, plan, "acceptance"),
        plots=(_by_position(scored), _by_domain(scored), _per_step_plot(per_step)),
    )


def _nothing_known(subject: Subject, plan: Plan, counters: DecodeCounters) -> CheckResult:
    nothing = counters.num_drafts == 0
    return CheckResult(
        id="acceptance",
        claim=acceptance.claim,
        verdict=Verdict.INCONCLUSIVE if nothing else Verdict.NOT_RUN,
        summary="nothing was drafted, so there is no acceptance"
        if nothing
        else "the draft's own law is not known here",
        advice="find out why nothing is drafted: the engine may have switched speculation off without a word",
        reproduce=reproduce(subject, plan, "acceptance"),
    )


def _measured_against_expected(subject: Subject, scored: ScoredTraces) -> tuple[StatisticalTest, ...]:
    """Each tested draft is accepted with probability Σ min(p, q) given the past, under chain rejection."""
    rows, flags = tested_positions(scored)
    other_law = subject.decoder is not None and subject.decoder.rule in _OTHER_ACCEPTANCE
    if not len(rows) or other_law:
        return ()
    probs = np.clip(scored["overlap"][rows], _SURELY, 1 - _SURELY)
    bets = bernoulli_bets(flags, probs)
    sides = (
        ("more accepted than Σ min(p, q) allows: proof of lossiness", bets.above),
        ("less accepted than expected: a draft state or cache fault", bets.below),
    )
    return tuple(
        StatisticalTest(
            name=name,
            statistic=float(flags.mean() - probs.mean()),
            log10_e=float(path[-1]),
            allowed=math.nan,
            failed=False,
            num_samples=len(rows),
            effect_unit="acceptance",
        )
        for name, path in sides
    )


def _measurements(
    expected: Interval, counters: DecodeCounters, per_step: dict[int, float]
) -> dict[str, float | int | str]:
    return {
        "expected_acceptance": expected.estimate,
        "expected_acceptance_low": expected.low,
        "expected_acceptance_high": expected.high,
        "acceptance_rate": counters.acceptance_rate,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "num_accepted_tokens_per_pos": ", ".join(map(str, counters.num_accepted_tokens_per_pos)),
        **{f"tokens_per_step_with_{g}_drafts": value for g, value in per_step.items()},
    }


def _furthest_prompts(scored: ScoredTraces) -> tuple[Finding, ...]:
    """The prompts after which draft and target are furthest apart."""
    prompts = scored.prompts()
    means = {number: float(scored["overlap"][prompts == number].mean()) for number in np.unique(prompts).tolist()}
    names = {number: scored.traces[int(scored["trace"][prompts == number][0])].request.prompt_id for number in means}
    worst = sorted(means, key=lambda number: means[number])[:5]
    listed = ", ".join(f"{names[number]} ({means[number]:.2f})" for number in worst)
    return (Finding(text=f"draft and target are furthest apart after: {listed}", severity=Verdict.PASS),)


def _by_position(scored: ScoredTraces) -> Plot:
    """Expected acceptance at each position after the prompt."""
    positions = scored["position"].astype(int)
    prompts = scored.prompts()
    intervals = {
        place: cluster_interval(scored["overlap"][positions == place], prompts[positions == place])
        for place in range(int(positions.max()) + 1)
        if (positions == place).sum() > 1
    }
    return _bars_or_line(
        "acceptance/position", "Acceptance by position", "token after the prompt", intervals, PlotKind.LINE
    )


def _by_domain(scored: ScoredTraces) -> Plot:
    """Expected acceptance in each domain."""
    domains, prompts = scored.domains(), scored.prompts()
    intervals = {
        str(domain): cluster_interval(scored["overlap"][domains == domain], prompts[domains == domain])
        for domain in np.unique(domains)
    }
    return _bars_or_line("acceptance/domain", "Acceptance by domain", "domain", intervals, PlotKind.BAR)


def _bars_or_line(
    plot_id: str, title: str, x_label: str, intervals: dict[str, Interval] | dict[int, Interval], kind: PlotKind
) -> Plot:
    series = Series(
        label="Σ min(p, q), 95 % interval by prompt",
        x=tuple(intervals),
        y=tuple(each.estimate for each in intervals.values()),
        low=tuple(max(0.0, each.low) for each in intervals.values()),
        high=tuple(min(1.0, each.high) for each in intervals.values()),
    )
    caption = "Where it falls, drafts are wasted; it says nothing about correctness."
    return Plot(
        id=plot_id,
        title=title,
        x_label=x_label,
        y_label="expected acceptance",
        kind=kind,
        series=(series,),
        caption=caption,
    )


def _per_step_plot(per_step: dict[int, float]) -> Plot:
    return Plot(
        id="acceptance/tokens_per_step",
        title="Tokens a step against number of speculative tokens",
        x_label="speculative tokens",
        y_label="tokens a step",
        kind=PlotKind.LINE,
        series=(Series(label="predicted from the transcripts", x=tuple(per_step), y=tuple(per_step.values())),),
        caption="Where the line flattens, further drafts are mostly thrown away.",
    )


_ADVICE = (
    "more acceptance than the two laws allow means that the rule is lossy; less means that the draft sees another context "
    "than the target: look at its cache, positions and sampling parameters"
)

acceptance = Check(
    id="acceptance",
    claim="drafts are accepted as often as the two laws say, no more and no less",
    rounds=lossless_rounds,
    decided=enough,
    wanted_tokens=lambda plan: plan.lossless_tokens,
    conclude=_conclude,
)
"""Rao-Blackwellised: Σ min(p, q) at every position, drafted or not, clustered by prompt. Never evidence of correctness."""
