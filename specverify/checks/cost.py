"""cost: whether speculation with this draft is faster than the target alone, measured side by side."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.acceptance import boundaries
from specverify.checks.check import Check, asked, reproduce, sampling, spread
from specverify.checks.lossless import enough, lossless_rounds
from specverify.context import Row
from specverify.decoding import autoregressive, speculative
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, Verdict
from specverify.statistics.acceptance import best_num_speculative_tokens
from specverify.statistics.interval import Interval, paired_ratio_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.decoding import Decoder
    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.records import DecodeRequest, DecodeTrace
    from specverify.scoring import ScoredTraces
    from specverify.statistics.acceptance import SpeedPrediction
    from specverify.subject import Subject

__all__ = ["Costs", "cost", "measured_speedup"]

_MOST_SPECULATIVE_TOKENS = 8
_TIMED_TOKENS = 24
_MOST_EXTENSIONS = 3
"""An undecided measurement is repeated up to this many times as often, all pairs kept."""


@dataclass(frozen=True)
class Costs:
    """Medians of single passes at batch 1, milliseconds."""

    target_ms: dict[int, float]
    """Tokens in the block to T(block) of the target."""
    draft_ms: float

    @property
    def cost_ratio(self) -> float:
        """c: one draft pass over one target pass."""
        return self.draft_ms / self.target_ms[1]

    def verification_ratio(self, num_drafts: int) -> float:
        """T(g + 1) / T(1): what verifying g drafts costs, in passes of the target alone."""
        return self.target_ms[num_drafts + 1] / self.target_ms[1]


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of `work`, everything that it queued on the device included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@torch.inference_mode()
def _pass_ms(model: LanguageModel, prompt: Sequence[int], blocks: Sequence[int], repeats: int) -> dict[int, float]:
    """Median time of appending a block of each size after `prompt`, sizes interleaved, first round thrown away."""
    session = model.open([prompt])
    held = session.lengths.clone()
    times: dict[int, list[float]] = {block: [] for block in blocks}
    for repeat in range(repeats + 1):
        for block in blocks:
            ids = torch.full((1, block), int(prompt[-1]), device=model.device)
            sizes = torch.tensor([block], device=model.device)
            taken = _seconds(model.device, lambda ids=ids, sizes=sizes: session.append(ids, sizes))  # type: ignore[misc]  # the lambda has defaults
            session.rollback(held)
            if repeat:
                times[block].append(1e3 * taken)
    return {block: float(np.median(each)) for block, each in times.items()}


def measured_costs(
    target: LanguageModel, draft: LanguageModel, prompt: Sequence[int], *, num_drafts: int, repeats: int
) -> Costs:
    """T(k) of the target for every block that could be verified, and one pass of the draft."""
    blocks = range(1, max(_MOST_SPECULATIVE_TOKENS, num_drafts) + 2)
    return Costs(_pass_ms(target, prompt, blocks, repeats), _pass_ms(draft, prompt, (1,), 3 * repeats)[1])


@dataclass(frozen=True)
class Timings:
    """Interleaved pairs: seconds a token of the target alone and of speculation, on the same request."""

    alone_s: tuple[float, ...]
    speculative_s: tuple[float, ...]

    def speedup(self, seed: int) -> Interval:
        """Time alone over time speculative, with a bootstrap interval over the pairs."""
        return paired_ratio_interval(np.array(self.alone_s), np.array(self.speculative_s), seed=seed)


def measured_speedup(decoder: Decoder, requests: Sequence[DecodeRequest], *, repeats: int, minimum: float) -> Timings:
    """Decode each request both ways, in turn; go on, up to `_MOST_EXTENSIONS` times, while the interval holds `minimum`."""
    pairs: list[tuple[float, float]] = []
    _timed(decoder, requests[0], alone_first=True)  # warm-up
    for _ in range(_MOST_EXTENSIONS):
        for repeat in range(repeats):
            request = requests[(len(pairs) + repeat) % len(requests)]
            pairs.append(_timed(decoder, request, alone_first=repeat % 2 == 0))
        timings = Timings(*map(tuple, zip(*pairs, strict=True)))
        interval = timings.speedup(0)
        if not interval.low <= minimum <= interval.high:
            break
    return timings


def _timed(decoder: Decoder, request: DecodeRequest, *, alone_first: bool) -> tuple[float, float]:
    """Seconds a token, alone and speculative."""
    taken = {}
    for algorithm in (autoregressive, speculative) if alone_first else (speculative, autoregressive):
        traces: list[DecodeTrace] = []
        seconds = _seconds(
            decoder.target.device,
            lambda run=algorithm, into=traces: into.extend(run(decoder, [Row(request, 0)])),  # type: ignore[misc]  # the lambda has defaults
        )
        taken[algorithm.__name__] = seconds / max(1, len(traces[0].token_ids))
    return taken["autoregressive"], taken["speculative"]


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    if subject.decoder is None or subject.draft is None or not len(scored["posterior"]):
        return CheckResult(
            id="cost",
            claim=cost.claim,
            verdict=Verdict.NOT_RUN,
            summary="needs the reference decoder and a draft model to time",
            reproduce=reproduce(subject, plan, "cost"),
        )
    prompts = sorted(subject.prompts, key=lambda prompt: len(prompt.token_ids))
    middle = prompts[len(prompts) // 2]
    costs = measured_costs(
        subject.target,
        subject.draft,
        middle.token_ids,
        num_drafts=plan.num_speculative_tokens,
        repeats=plan.cost_repeats,
    )
    # everything is decoded to the same length: a text that ends early would time the prefill
    params = replace(sampling(subject, plan), max_new_tokens=_TIMED_TOKENS, eos_token_ids=())
    requests = asked("cost", plan, spread(tuple(prompts[: 3 * len(prompts) // 4 + 1]), plan.cost_repeats), params)
    timings = measured_speedup(subject.decoder, requests, repeats=plan.cost_repeats, minimum=plan.minimum_speedup)
    best, predictions = best_num_speculative_tokens(
        np.clip(scored["posterior"], 0, 1),
        boundaries(scored),
        draft_cost=costs.cost_ratio,
        verify_cost=costs.verification_ratio,
        most=_MOST_SPECULATIVE_TOKENS,
    )
    return _judged(subject, plan, costs, timings, best, predictions)


def verdict_of(interval: Interval, minimum: float) -> Verdict:
    """PASS above the minimum, FAIL below it, INCONCLUSIVE while the interval holds it."""
    if interval.low > minimum:
        return Verdict.PASS
    return Verdict.FAIL if interval.high < minimum else Verdict.INCONCLUSIVE


def _judged(
    subject: Subject,
    plan: Plan,
    costs: Costs,
    timings: Timings,
    best: SpeedPrediction,
    predictions: tuple[SpeedPrediction, ...],
) -> CheckResult:
    interval = timings.speedup(plan.seed)
    verdict = verdict_of(interval, plan.minimum_speedup)
    at_plan = next((p for p in predictions if p.num_speculative_tokens == plan.num_speculative_tokens), best)
    summary = (
        f"measured speed-up {interval.estimate:.2f}x [{interval.low:.2f}, {interval.high:.2f}] with "
        f"{plan.num_speculative_tokens} drafts (wanted above {plan.minimum_speedup:.2f}x); predicted {at_plan.speedup:.2f}x"
    )
    findings: tuple[Finding, ...] = ()
    if verdict is Verdict.FAIL:
        findings = (Finding(text=f"speculation is slower than wanted: {_advice(best)}"),)
    return CheckResult(
        id="cost",
        claim=cost.claim,
        verdict=verdict,
        summary=summary,
        findings=findings,
        measurements=_measurements(subject, plan, costs, timings, interval, best, at_plan),
        num_samples=len(timings.alone_s),
        sample_unit="interleaved pairs",
        smallest_detectable=(interval.high - interval.low) / 2,
        effect_unit="speed-up (half width)",
        advice=_advice(best),
        reproduce=reproduce(subject, plan, "cost"),
        plots=(_speedup_plot(plan, predictions, interval), _pass_plot(costs)),
    )


def _advice(best: SpeedPrediction) -> str:
    if best.num_speculative_tokens == 0:
        return "speculation is a loss with this draft at every number of tokens: take a smaller or a better draft"
    return (
        f"the best prediction is {best.speedup:.2f}x with {best.num_speculative_tokens} speculative tokens; "
        "measure again on a quieter machine, or with --budget deep, if this is close"
    )


def _measurements(
    subject: Subject,
    plan: Plan,
    costs: Costs,
    timings: Timings,
    interval: Interval,
    best: SpeedPrediction,
    at_plan: SpeedPrediction,
) -> dict[str, float | int | str]:
    pair = subject.pair
    memory = {
        f"{role}_memory_bytes": loaded.model.memory_bytes
        for role, loaded in (("target", pair.target), ("draft", pair.draft))
        if loaded is not None
    } if pair is not None else {}  # fmt: skip
    return {
        "measured_speedup": interval.estimate,
        "measured_speedup_low": interval.low,
        "measured_speedup_high": interval.high,
        "predicted_speedup": at_plan.speedup,
        "best_num_speculative_tokens": best.num_speculative_tokens,
        "best_predicted_speedup": best.speedup,
        "tokens_per_step": at_plan.tokens_per_step,
        "target_calls_per_token": 1 / at_plan.tokens_per_step,
        "target_pass_ms": costs.target_ms[1],
        "target_verification_pass_ms": costs.target_ms[plan.num_speculative_tokens + 1],
        "draft_pass_ms": costs.draft_ms,
        "cost_ratio": costs.cost_ratio,
        "verification_ratio": costs.verification_ratio(plan.num_speculative_tokens),
        "alone_tokens_per_s": len(timings.alone_s) / sum(timings.alone_s),
        "speculative_tokens_per_s": len(timings.speculative_s) / sum(timings.speculative_s),
        **memory,
        "peak_memory_bytes": _peak_memory_bytes(subject.target.device),
        "raw_alone_ms_per_token": ", ".join(f"{1e3 * each:.2f}" for each in timings.alone_s),
        "raw_speculative_ms_per_token": ", ".join(f"{1e3 * each:.2f}" for each in timings.speculative_s),
    }


def _peak_memory_bytes(device: torch.device) -> int:
    """Of the device where there is one, otherwise of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _speedup_plot(plan: Plan, predictions: tuple[SpeedPrediction, ...], interval: Interval) -> Plot:
    numbers = tuple(float(prediction.num_speculative_tokens) for prediction in predictions)
    return Plot(
        id="cost/speedup",
        title="Speed-up against number of speculative tokens",
        x_label="speculative tokens",
        y_label="speed-up over the target alone",
        kind=PlotKind.LINE,
        series=(
            Series(label="predicted", x=numbers, y=tuple(prediction.speedup for prediction in predictions)),
            Series(
                label="measured",
                x=(float(plan.num_speculative_tokens),),
                y=(interval.estimate,),
                low=(interval.low,),
                high=(interval.high,),
            ),
            Series(label="no gain", x=(numbers[0], numbers[-1]), y=(1.0, 1.0), dashed=True),
        ),
        caption="Below the dashed line speculation costs more time than it saves.",
    )


def _pass_plot(costs: Costs) -> Plot:
    blocks = tuple(float(block) for block in costs.target_ms)
    return Plot(
        id="cost/passes",
        title="Time of one pass of the target",
        x_label="tokens in the block",
        y_label="milliseconds",
        kind=PlotKind.LINE,
        series=(
            Series(label="target", x=blocks, y=tuple(costs.target_ms.values())),
            Series(label="draft, one token", x=(blocks[0], blocks[-1]), y=(costs.draft_ms,) * 2, dashed=True),
        ),
        caption="The flatter the line, the cheaper it is to verify drafts.",
    )


cost = Check(
    id="cost",
    claim="speculation with this draft is faster than the target alone",
    rounds=lossless_rounds,
    decided=enough,
    wanted_tokens=lambda plan: plan.lossless_tokens,
    conclude=_conclude,
)
"""Interleaved pairs at batch 1, raw times kept; a prediction for every number of tokens from measured passes."""
