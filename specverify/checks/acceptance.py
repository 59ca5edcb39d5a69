"""acceptance: how many drafts the target takes, and whether that is what its law and the draft's say it must be.

Note [Three acceptances]: engines call different things by one name, so each has its own here. `expected_acceptance` is the
mean Σ min(p, q) over all positions, known without drafting once; `acceptance_rate` is accepted / drafted and smaller,
for it counts the drafts behind a rejection; `mean_acceptance_length` is 1 + accepted / drafts, in tokens. Only the first
may be put into a formula, and for tokens a step not even that one: the exact programme of `statistics.acceptance` is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.acceptance_plots import by_domain, domain_plot, per_step_plot, place_plot, position_plot
from specverify.checks.check import Check, reproduce
from specverify.checks.counters import Tested, drafts_tested, impossible_counters
from specverify.checks.evidence import detectable_growth
from specverify.checks.lossless import enough, lossless_rounds
from specverify.drafting import ScriptedDrafts
from specverify.records import CheckResult, Finding, StatisticalTest, Verdict, count, worst
from specverify.statistics.acceptance import tokens_per_step
from specverify.statistics.interval import Interval, cluster_interval, paired_ratio_interval
from specverify.statistics.sequential import bernoulli_bets
from specverify.verification.chain import greedy, sample_and_match
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from specverify.plan import Plan
    from specverify.records import DecodeCounters
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["MOST_SPECULATIVE_TOKENS", "acceptance", "boundaries", "tokens_per_step_interval"]

MOST_SPECULATIVE_TOKENS = 8
"""The largest number of speculative tokens that is predicted for."""
_ACCEPT_LESS = (sample_and_match, greedy)
"""Rules that match tokens: they may accept less than Σ min(p, q), but no lossless rule for one draft accepts more."""
_SURELY = 1e-6
"""Σ min(p, q) is kept this far from 0 and 1: a rounding of the cached logits must not count as proof."""
_NUM_TILTS = 3
"""Bets that `bernoulli_bets` mixes on each side."""
_ABOVE = "more accepted than Σ min(p, q) allows: proof of lossiness"
_BELOW = "less accepted than Σ min(p, q): a fault of the draft's state or of its reported law"


# ---------------------------------------------------------------------------------------------- what was answered


def boundaries(scored: ScoredTraces) -> list[int]:
    """Rows at which another transcript begins."""
    changes: list[int] = (np.flatnonzero(np.diff(scored["trace"])) + 1).tolist()
    return changes


def tokens_per_step_interval(scored: ScoredTraces, num_speculative_tokens: int, *, seed: int) -> Interval:
    """Tokens a step by the exact programme, with a bootstrap interval that resamples whole prompts.

    An interval that the data can't bound ends where tokens a step must: at 1 and at all drafts plus the bonus.
    """
    posterior, prompts, transcripts = np.clip(scored["posterior"], 0, 1), scored.prompts(), scored["trace"]
    tokens, steps = [], []
    for number in np.unique(prompts):
        mine = prompts == number
        starts = (np.flatnonzero(np.diff(transcripts[mine])) + 1).tolist()
        tokens.append(float(mine.sum()))
        steps.append(tokens[-1] / tokens_per_step(posterior[mine], num_speculative_tokens, starts))
    interval = paired_ratio_interval(np.array(tokens), np.array(steps), seed=seed)
    low, high = max(1.0, interval.low), min(num_speculative_tokens + 1.0, interval.high)
    return Interval(interval.estimate, low, high, interval.confidence)


# --------------------------------------------------------------------------------------------- what the answers show


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    counters = count(scored.traces)
    steps_known = any(trace.steps for trace in scored.traces)
    if not len(scored["overlap"]) or (steps_known and not counters.num_drafts):
        return _nothing_expected(subject, plan, counters, steps_known=steps_known)
    expected = cluster_interval(scored["overlap"], scored.prompts())
    if impossible := impossible_counters(scored.traces):
        return _counters_wrong(subject, plan, counters, impossible)
    tested = drafts_tested(scored)
    per_step = {
        g: tokens_per_step_interval(scored, g, seed=plan.seed)
        for g in sorted({*range(1, MOST_SPECULATIVE_TOKENS + 1), plan.num_speculative_tokens})
    }
    tests = _measured_against_expected(subject, plan, scored, tested)
    findings = (*_refusal(expected, plan), *_blind(tests, plan), _furthest_prompts(scored))
    refused = any(finding.severity is Verdict.FAIL for finding in findings)
    return CheckResult(
        id="acceptance",
        claim=acceptance.claim,
        verdict=worst(finding.severity for finding in findings) if steps_known or refused else Verdict.NOT_RUN,
        summary=_summary(plan, expected, per_step, counters, tested),
        findings=findings,
        tests=tests,
        measurements={
            "expected_acceptance": expected.estimate,
            "expected_acceptance_low": expected.low,
            "expected_acceptance_high": expected.high,
            **_counted(counters, scored),
            "num_drafts_tested": len(tested.rows),
            "accepted_of_tested": _mean(tested.accepted),
            "expected_of_tested": _mean(scored["overlap"][tested.rows]),
            **{f"tokens_per_step_with_{g}_drafts": each.estimate for g, each in per_step.items()},
            **{f"expected_acceptance_in_{name}": each.estimate for name, each in by_domain(scored).items()},
        },
        num_samples=len(scored),
        smallest_detectable=(expected.high - expected.low) / 2,
        effect_unit="expected acceptance (half width of its interval)",
        advice="take a draft that is closer to the target, or lower minimum_acceptance" if refused else _ADVICE,
        reproduce=reproduce(subject, plan, "acceptance"),
        plots=(position_plot(scored), place_plot(scored, tested), domain_plot(scored), per_step_plot(per_step)),
    )


def _nothing_expected(subject: Subject, plan: Plan, counters: DecodeCounters, *, steps_known: bool) -> CheckResult:
    """Nothing was drafted, or nothing is known of the draft's law: what was counted, and no more."""
    nothing = steps_known and not counters.num_drafts
    measured = f"; accepted / drafted measured: {counters.acceptance_rate:.3f}" if counters.num_drafts else ""
    return CheckResult(
        id="acceptance",
        claim=acceptance.claim,
        verdict=Verdict.INCONCLUSIVE if nothing else Verdict.NOT_RUN,
        summary="nothing was drafted, so there is no acceptance"
        if nothing
        else f"the draft's own law is not known here, so nothing can be expected{measured}",
        measurements=_counted(counters),
        advice="find out why nothing is drafted: the engine may have switched speculation off without a word"
        if nothing
        else "give a draft model, so that its law can be held against the target's",
        reproduce=reproduce(subject, plan, "acceptance"),
    )


def _counters_wrong(
    subject: Subject, plan: Plan, counters: DecodeCounters, impossible: tuple[Finding, ...]
) -> CheckResult:
    """What was counted can't have happened, so nothing can be measured with it."""
    return CheckResult(
        id="acceptance",
        claim=acceptance.claim,
        verdict=Verdict.FAIL,
        summary=f"the engine's counters contradict its own tokens: {impossible[0].place}: {impossible[0].text}",
        findings=impossible,
        measurements=_counted(counters),
        num_samples=counters.num_drafts or 0,
        sample_unit="steps",
        advice="count a draft as accepted where it is emitted, and the target's own token never",
        reproduce=reproduce(subject, plan, "acceptance"),
    )


def _summary(
    plan: Plan, expected: Interval, per_step: Mapping[int, Interval], counters: DecodeCounters, tested: Tested
) -> str:
    predicted = per_step[plan.num_speculative_tokens]
    said = (
        f"expected acceptance Σ min(p, q) = {expected.estimate:.3f} [{expected.low:.3f}, {expected.high:.3f}], so "
        f"{predicted.estimate:.2f} tokens a step with {plan.num_speculative_tokens} drafts; "
    )
    if not len(tested.rows):
        return f"{said}the engine tells no steps, so nothing was measured against it"
    return (
        f"{said}of {len(tested.rows):,} drafts tested {_mean(tested.accepted):.3f} were accepted "
        f"(accepted / drafted {counters.acceptance_rate:.3f})"
    )


def _refusal(expected: Interval, plan: Plan) -> tuple[Finding, ...]:
    """Refused where even the upper end is below the minimum."""
    if not expected.high < plan.minimum_acceptance:
        return ()
    text = (
        f"expected acceptance {expected.estimate:.3f} [{expected.low:.3f}, {expected.high:.3f}] is below the plan's "
        f"minimum of {plan.minimum_acceptance:.3f}: this draft is refused a rollout"
    )
    return (Finding(text=text),)


def _blind(tests: tuple[StatisticalTest, ...], plan: Plan) -> tuple[Finding, ...]:
    """INCONCLUSIVE where so few drafts were tested that a difference which matters would have gone unseen."""
    unseen = max((test.smallest_detectable or 0.0 for test in tests), default=0.0)
    if unseen <= plan.largest_undetected_acceptance:
        return ()
    needed = math.ceil(tests[0].num_samples * (unseen / plan.largest_undetected_acceptance) ** 2)
    text = (
        f"only {tests[0].num_samples:,} drafts were tested: an acceptance that is wrong by up to {unseen:.2f} would have "
        f"gone unseen (the plan allows {plan.largest_undetected_acceptance:.2f}, which takes about {needed:,}); set "
        "lossless_tokens higher in the plan, or use a larger --budget"
    )
    return (Finding(text=text, severity=Verdict.INCONCLUSIVE),)


def _measured_against_expected(
    subject: Subject, plan: Plan, scored: ScoredTraces, tested: Tested
) -> tuple[StatisticalTest, ...]:
    """Each tested draft is accepted with probability Σ min(p, q) given the past, under chain rejection.

    Of an engine that is not the reference decoder the rule isn't known, and one that verifies blocks as a whole may
    accept more at one place of a block; siblings of a tree are accepted more often than one draft, and coupled ones
    follow another formula. Drafts that were not drawn from the draft's law are point masses, accepted with p(x), which may
    be more than Σ min(p, q) or less. So there nothing is tested.
    """
    decoder = subject.decoder
    if not len(tested.rows) or decoder is None or isinstance(decoder.drafter, ScriptedDrafts):
        return ()
    if decoder.drafts is not Drafts.CHAIN:
        return ()
    probs = np.clip(scored["overlap"][tested.rows], _SURELY, 1 - _SURELY)
    bets = bernoulli_bets(tested.accepted, probs)
    paths = {_ABOVE: bets.above, _BELOW: bets.below}
    if decoder.rule in _ACCEPT_LESS:
        del paths[_BELOW]
    return tuple(
        StatisticalTest(
            name=name,
            statistic=float(tested.accepted.mean() - probs.mean()),
            log10_e=float(path[-1]),
            allowed=math.nan,
            failed=False,
            num_samples=len(probs),
            smallest_detectable=smallest_detectable_shift(probs, plan),
            effect_unit="acceptance",
        )
        for name, path in paths.items()
    )


def smallest_detectable_shift(probs: NDArray[np.float64], plan: Plan) -> float:
    """The shift d of every probability that either side reliably sees: its bet grows by about d² / 2σ² nats.

    σ² is the mean p (1 - p), of the shifted probabilities where that is more. The bet shares the error budget with the
    run's other e-processes, and its side with the other tilts.
    """
    nats = detectable_growth(len(probs), _NUM_TILTS, plan)
    shift = math.sqrt(2 * nats * float((probs * (1 - probs)).mean()))
    shifted = [np.clip(probs + move, 0, 1) for move in (-shift, 0.0, shift)]
    return min(1.0, math.sqrt(2 * nats * max(float((each * (1 - each)).mean()) for each in shifted)))


def _counted(counters: DecodeCounters, scored: ScoredTraces | None = None) -> dict[str, float | int | str]:
    """The counters, recomputed from the steps; see Note [Three acceptances]."""
    steps = sum(len(trace.steps) for trace in scored.traces) if scored is not None else 0
    return {
        "acceptance_rate": counters.acceptance_rate,
        "mean_acceptance_length": counters.mean_acceptance_length,
        **({"measured_tokens_per_step": len(scored) / steps} if scored is not None and steps else {}),
        "num_drafts": counters.num_drafts or 0,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "num_accepted_tokens_per_pos": ", ".join(map(str, counters.num_accepted_tokens_per_pos)),
    }


def _furthest_prompts(scored: ScoredTraces) -> Finding:
    """The prompts after which draft and target are furthest apart."""
    prompts, owners = scored.prompts(), scored["trace"].astype(int)
    _, first, number = np.unique(prompts, return_index=True, return_inverse=True)
    means = np.bincount(number, weights=scored["overlap"]) / np.bincount(number)
    of_trace = scored.requests()
    requests = [of_trace[owner] for owner in owners[first].tolist()]
    worst = np.argsort(means, kind="stable")[:5].tolist()
    listed = ", ".join(f"{requests[at].prompt_id or requests[at].id} ({means[at]:.2f})" for at in worst)
    return Finding(text=f"draft and target are furthest apart after: {listed}", severity=Verdict.PASS)


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else math.nan


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
