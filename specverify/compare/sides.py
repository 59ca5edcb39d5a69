"""Where a side comes from: a certificate, a golden, or a pair that is measured now."""

from __future__ import annotations

import dataclasses
import math
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from specverify.certify import fingerprints
from specverify.checks.acceptance import boundaries
from specverify.checks.check import asked
from specverify.checks.cost import measured_costs
from specverify.compare.difference import STRETCH
from specverify.compare.records import Between, PromptAcceptance, Side
from specverify.records import DecodeTrace, SamplingParams
from specverify.scoring import score
from specverify.statistics.acceptance import speedup, tokens_per_step
from specverify.statistics.interval import cluster_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specverify.golden.records import Golden
    from specverify.plan import Plan
    from specverify.records import Certificate, CheckResult, Plot
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["of_certificate", "of_golden", "of_pair", "of_traces", "transcripts"]

_REPEATS = 9
_FIGURES = ("target_memory_bytes", "draft_memory_bytes", "peak_memory_bytes", "best_num_speculative_tokens")


# ------------------------------------------------------------------------------------------------ certificate


def of_certificate(certificate: Certificate, name: str) -> Side:
    """What a certificate keeps: intervals of the whole, of domains and of positions, and the speed-up."""
    checks = {check.id: check for check in certificate.checks}
    accepted, cost = checks.get("acceptance"), checks.get("cost")
    draft = certificate.draft
    return Side(
        name=name,
        kind="certificate",
        verdict=certificate.verdict,
        target_sha256=certificate.target.weights_sha256,
        tokenizer_sha256=certificate.target.tokenizer_sha256,
        draft_sha256=draft.weights_sha256 if draft is not None else "",
        acceptance=_between(accepted, "expected_acceptance"),
        domains=_plotted(accepted, "acceptance/domain"),
        positions={f"token {position}": each for position, each in _plotted(accepted, "acceptance/position").items()},
        tokens_per_step=_number(cost, "tokens_per_step"),
        speedup=_speedup(cost),
        measurements={key: _number(cost, key) for key in _FIGURES if math.isfinite(_number(cost, key))},
    )


def _number(check: CheckResult | None, key: str) -> float:
    value = check.measurements.get(key, math.nan) if check is not None else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def _between(check: CheckResult | None, key: str) -> Between:
    estimate, low, high = (_number(check, f"{key}{end}") for end in ("", "_low", "_high"))
    return Between(estimate=estimate, low=low, high=high)


def _speedup(check: CheckResult | None) -> Between | None:
    found = _between(check, "measured_speedup")
    return found if math.isfinite(found.estimate) else None


def _plotted(check: CheckResult | None, plot_id: str) -> dict[str, Between]:
    plots: Sequence[Plot] = check.plots if check is not None else ()
    for plot in plots:
        if plot.id == plot_id and plot.series:
            line = plot.series[0]
            ends = zip(line.x, line.y, line.low or line.y, line.high or line.y, strict=True)
            return {
                str(int(x) if isinstance(x, float) else x): Between(estimate=y, low=low, high=high)
                for x, y, low, high in ends
            }
    return {}


# ------------------------------------------------------------------------------------------------ golden


def of_golden(golden: Golden, name: str) -> Side:
    """What a golden recorded of each prompt."""
    prompts = {
        each.prompt.id: PromptAcceptance(domain=each.prompt.domain, mean=each.decoded.expected_acceptance)
        for each in golden.prompts
        if math.isfinite(each.decoded.expected_acceptance)
    }
    means = np.array([each.mean for each in prompts.values()])
    interval = cluster_interval(means, np.arange(len(means)))
    return Side(
        name=name,
        kind="golden",
        target_sha256=golden.weights.fingerprint.weights_sha256,
        tokenizer_sha256=golden.tokenizer.files_sha256,
        draft_sha256=golden.draft.fingerprint.weights_sha256 if golden.draft is not None else "",
        acceptance=Between(estimate=interval.estimate, low=interval.low, high=interval.high),
        prompts=prompts,
    )


# ------------------------------------------------------------------------------------------------ pair


def transcripts(subject: Subject, plan: Plan) -> tuple[DecodeTrace, ...]:
    """Texts of the target alone: what acceptance and speed are predicted from, with any draft."""
    params = SamplingParams(
        temperature=plan.params.temperature, max_new_tokens=plan.max_new_tokens, eos_token_ids=subject.eos_token_ids
    )
    return tuple(subject.engine.decode(asked("compare", plan, subject.prompts, params, speculation=False)))


def of_pair(subject: Subject, plan: Plan, name: str, traces: Sequence[DecodeTrace] | None = None) -> Side:
    """Score texts of the target against the draft, and time single passes. The same `traces` for both sides pair them."""
    traces = transcripts(subject, plan) if traces is None else traces
    side = of_traces(subject, traces, name, num_speculative_tokens=plan.num_speculative_tokens)
    if subject.draft is None or not math.isfinite(side.tokens_per_step):
        return side
    prompt = subject.prompts[0].token_ids
    costs = measured_costs(
        subject.target,
        subject.draft,
        prompt,
        most=plan.num_speculative_tokens + 1,
        repeats=_REPEATS,
        clock=perf_counter,
    )
    predicted = speedup(
        side.tokens_per_step,
        num_speculative_tokens=plan.num_speculative_tokens,
        draft_cost=costs.cost_ratio,
        verify_cost=costs.verification_ratio(plan.num_speculative_tokens),
    )
    figures = {"predicted_speedup": predicted, "draft_pass_ms": costs.draft_ms, "target_pass_ms": costs.target_ms[1]}
    return dataclasses.replace(side, measurements={**side.measurements, **figures})


def of_traces(subject: Subject, traces: Sequence[DecodeTrace], name: str, *, num_speculative_tokens: int) -> Side:
    """Acceptance after each prompt, and tokens a step by the exact programme."""
    scored = score(traces, target=subject.target, draft=subject.draft, workers=subject.workers)
    target, draft = fingerprints(subject)
    interval = cluster_interval(scored["overlap"], scored.prompts())
    posterior = np.clip(scored["posterior"], 0, 1)
    memory = {"target_memory_bytes": subject.pair.target.model.memory_bytes} if subject.pair is not None else {}
    if subject.pair is not None and subject.pair.draft is not None:
        memory["draft_memory_bytes"] = subject.pair.draft.model.memory_bytes
    return Side(
        name=name,
        kind="pair",
        target_sha256=target.weights_sha256,
        tokenizer_sha256=target.tokenizer_sha256,
        draft_sha256=draft.weights_sha256 if draft is not None else "",
        acceptance=Between(estimate=interval.estimate, low=interval.low, high=interval.high),
        prompts=_by_prompt(scored),
        tokens_per_step=tokens_per_step(posterior, num_speculative_tokens, boundaries(scored))
        if len(posterior)
        else math.nan,
        measurements=memory,
    )


def _by_prompt(scored: ScoredTraces) -> Mapping[str, PromptAcceptance]:
    if not len(scored["overlap"]):
        return {}
    owners = np.array([trace.request.prompt_id for trace in scored.traces])[scored["trace"].astype(np.int64)]
    domains = {trace.request.prompt_id: trace.request.domain for trace in scored.traces}
    stretches = (scored["position"] // STRETCH).astype(np.int64)
    found = {}
    for name in sorted(set(owners.tolist())):
        mine = owners == name
        overlap, stretch = scored["overlap"][mine], stretches[mine]
        by_position = tuple(
            float(overlap[stretch == number].mean()) if (stretch == number).any() else math.nan
            for number in range(int(stretch.max()) + 1)
        )
        found[name] = PromptAcceptance(domain=domains[name], mean=float(overlap.mean()), by_position=by_position)
    return found
