"""cost: whether speculation with this draft is faster than the target alone, measured side by side.

How times are taken stands in Note [Timing]. A single pass is the median of its turns; a decode is timed in pairs, alone
and speculative, on the same request, and the interval resamples whole pairs. Everything is decoded to the same length,
for a text that ends early would time the prefill. All raw times are kept.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.acceptance import MOST_SPECULATIVE_TOKENS, boundaries, tokens_per_step_interval
from specverify.checks.check import Check, asked, reproduce, sampling, spread
from specverify.checks.lossless import enough, lossless_rounds
from specverify.context import Row
from specverify.decoding import autoregressive, speculative
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, Verdict
from specverify.statistics.acceptance import best_num_speculative_tokens
from specverify.statistics.interval import Interval, paired_ratio_interval
from specverify.timing import in_turns, seconds

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.decoding import Decoder
    from specverify.models import LanguageModel, Session
    from specverify.models.loading import LoadedModel
    from specverify.plan import Plan
    from specverify.records import DecodeRequest, DecodeTrace
    from specverify.scoring import ScoredTraces
    from specverify.statistics.acceptance import SpeedPrediction
    from specverify.subject import EncodedPrompt, Subject

    Clock = Callable[[], float]

__all__ = ["Costs", "Timings", "cost", "kv_bytes_per_token", "measured_costs", "measured_speedup"]

_TIMED_TOKENS = 24
_MOST_EXTENSIONS = 3
"""An undecided measurement is repeated up to this many times as often, all pairs kept."""


@dataclass(frozen=True)
class Costs:
    """Medians of single passes, milliseconds."""

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


@dataclass(frozen=True)
class Timings:
    """Interleaved pairs: seconds a token of the target alone and of speculation, on the same request."""

    alone_s: tuple[float, ...]
    speculative_s: tuple[float, ...]

    def speedup(self, seed: int) -> Interval:
        """Time alone over time speculative, in all; its 5 % are shared among `_MOST_EXTENSIONS` looks."""
        alone, together = np.array(self.alone_s), np.array(self.speculative_s)
        return paired_ratio_interval(alone, together, seed=seed, confidence=1 - 0.05 / _MOST_EXTENSIONS)


@torch.inference_mode()
def measured_costs(
    target: LanguageModel,
    draft: LanguageModel,
    prompt: Sequence[int],
    *,
    most: int,
    repeats: int,
    clock: Clock,
    batch: int = 1,
) -> Costs:
    """T(k) of the target for each block of k <= `most` tokens after `prompt`, and T(1) of the draft, in turns.

    What was appended is rolled back, so every pass sees the same cache.
    """

    def one_pass(model: LanguageModel, session: Session, block: int) -> Callable[[], object]:
        ids = torch.full((batch, block), int(prompt[-1]), device=model.device)
        sizes, held = torch.full_like(ids[:, 0], block), torch.full_like(ids[:, 0], len(prompt))

        def run() -> None:
            session.append(ids, sizes)
            session.rollback(held)

        return run

    session = target.open([prompt] * batch)
    passes = {str(block): one_pass(target, session, block) for block in range(1, most + 1)}
    passes["draft"] = one_pass(draft, draft.open([prompt] * batch), 1)
    taken = in_turns(passes, device=target.device, repeats=repeats, clock=clock)
    medians = {name: 1e3 * float(np.median(each)) for name, each in taken.items()}
    draft_ms = medians.pop("draft")
    return Costs(draft_ms=draft_ms, target_ms={int(block): ms for block, ms in medians.items()})


def measured_speedup(
    decoder: Decoder, requests: Sequence[DecodeRequest], *, repeats: int, minimum: float, seed: int, clock: Clock
) -> Timings:
    """Decode each request both ways, in turn; go on, up to `_MOST_EXTENSIONS` times, while the interval holds `minimum`."""
    pairs: list[tuple[float, float]] = []
    _timed(decoder, requests[0], alone_first=True, clock=clock)  # warm-up
    for _ in range(_MOST_EXTENSIONS):
        for _ in range(max(2, repeats)):
            sweep, place = divmod(len(pairs), len(requests))
            alone_first = (sweep + place) % 2 == 0  # so that a second sweep takes every request the other way round
            pairs.append(_timed(decoder, requests[place], alone_first=alone_first, clock=clock))
        timings = Timings(tuple(alone for alone, _ in pairs), tuple(together for _, together in pairs))
        if verdict_of(timings.speedup(seed), minimum) is not Verdict.INCONCLUSIVE:
            break
    return timings


def _timed(decoder: Decoder, request: DecodeRequest, *, alone_first: bool, clock: Clock) -> tuple[float, float]:
    """Seconds a token, alone and speculative."""
    taken = {}
    for algorithm in (autoregressive, speculative) if alone_first else (speculative, autoregressive):
        traces: list[DecodeTrace] = []
        spent = seconds(
            decoder.target.device,
            lambda run=algorithm, into=traces: into.extend(run(decoder, [Row(request, 0)])),  # type: ignore[misc]  # the lambda has defaults
            clock,
        )
        taken[algorithm] = spent / max(1, len(traces[0].token_ids))
    return taken[autoregressive], taken[speculative]


def verdict_of(interval: Interval, minimum: float) -> Verdict:
    """PASS above the minimum, FAIL below it, INCONCLUSIVE while the interval holds it."""
    if interval.low > minimum:
        return Verdict.PASS
    return Verdict.FAIL if interval.high < minimum else Verdict.INCONCLUSIVE


@dataclass(frozen=True)
class _Measured:
    """Everything that was timed."""

    costs: Costs
    timings: Timings
    interval: Interval
    """Of the measured speed-up: it alone decides."""
    best: SpeedPrediction
    predictions: tuple[SpeedPrediction, ...]
    """From single passes and the exact programme, for 0 (the target alone), 1, 2, ... speculative tokens."""
    predicted: dict[int, Interval]
    """Of the predicted speed-ups, by number: the spread of tokens a step over the prompts, at the median costs."""
    plan: Plan

    @property
    def verdict(self) -> Verdict:
        """A prediction decides nothing."""
        return verdict_of(self.interval, self.plan.minimum_speedup)


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces, *, clock: Clock = time.perf_counter) -> CheckResult:
    if subject.decoder is None or subject.draft is None or not len(scored["posterior"]):
        return _not_run(subject, plan, "needs the reference decoder and a draft model to time")
    prompts = _fitting(subject, plan)
    if not prompts:
        return _not_run(subject, plan, f"no prompt leaves room for {_TIMED_TOKENS} tokens in target and draft")
    most = max(MOST_SPECULATIVE_TOKENS, plan.num_speculative_tokens)
    middle, repeats = prompts[len(prompts) // 2].token_ids, max(2, plan.cost_repeats)
    costs = measured_costs(subject.target, subject.draft, middle, most=most + 1, repeats=repeats, clock=clock)
    endless = replace(sampling(subject, plan), eos_token_ids=(), stop_token_ids=(), stop_strings=())
    requests = asked("cost", plan, spread(prompts, repeats), replace(endless, max_new_tokens=_TIMED_TOKENS))
    timings = measured_speedup(
        subject.decoder, requests, repeats=repeats, minimum=plan.minimum_speedup, seed=plan.seed, clock=clock
    )
    best, predictions = best_num_speculative_tokens(
        np.clip(scored["posterior"], 0, 1),
        boundaries(scored),
        draft_cost=costs.cost_ratio,
        verify_cost=costs.verification_ratio,
        most=most,
    )
    predicted = {each.num_speculative_tokens: _predicted(scored, each, plan) for each in predictions[1:]}
    return _result(subject, _Measured(costs, timings, timings.speedup(plan.seed), best, predictions, predicted, plan))


def _predicted(scored: ScoredTraces, prediction: SpeedPrediction, plan: Plan) -> Interval:
    tokens = tokens_per_step_interval(scored, prediction.num_speculative_tokens, seed=plan.seed)
    scale = prediction.speedup / prediction.tokens_per_step
    return Interval(prediction.speedup, scale * tokens.low, scale * tokens.high, tokens.confidence)


def _fitting(subject: Subject, plan: Plan) -> tuple[EncodedPrompt, ...]:
    """The shorter three quarters of the prompts that leave room in both models, shortest first."""
    room = max(_TIMED_TOKENS, MOST_SPECULATIVE_TOKENS + 1, plan.num_speculative_tokens + 1)
    longest = min(subject.target.max_length, subject.draft.max_length if subject.draft is not None else 0) - room
    prompts = sorted(subject.prompts, key=lambda prompt: len(prompt.token_ids))
    return tuple(prompt for prompt in prompts[: 3 * len(prompts) // 4 + 1] if len(prompt.token_ids) <= longest)


def _not_run(subject: Subject, plan: Plan, reason: str) -> CheckResult:
    return CheckResult(
        id="cost",
        claim=cost.claim,
        verdict=Verdict.NOT_RUN,
        summary=reason,
        reproduce=reproduce(subject, plan, "cost"),
    )


def _result(subject: Subject, measured: _Measured) -> CheckResult:
    interval, plan = measured.interval, measured.plan
    expected = measured.predicted[plan.num_speculative_tokens]
    summary = (
        f"measured speed-up {interval.estimate:.2f}x [{interval.low:.2f}, {interval.high:.2f}] over the target alone with "
        f"{plan.num_speculative_tokens} speculative tokens, at batch 1 in the reference decoder (wanted above "
        f"{plan.minimum_speedup:.2f}x); predicted from single passes {expected.estimate:.2f}x [{expected.low:.2f}, {expected.high:.2f}]"
    )
    return CheckResult(
        id="cost",
        claim=cost.claim,
        verdict=measured.verdict,
        summary=summary,
        findings=_findings(measured),
        measurements=_figures(measured) | _memory(subject),
        num_samples=len(measured.timings.alone_s),
        sample_unit="interleaved pairs",
        smallest_detectable=(interval.high - interval.low) / 2,
        effect_unit="speed-up (half width)",
        advice=_advice(measured),
        reproduce=reproduce(subject, plan, "cost"),
        plots=(_speedup_plot(measured), _pass_plot(measured.costs)),
    )


def _findings(measured: _Measured) -> tuple[Finding, ...]:
    best, plan, predicted = measured.best, measured.plan, measured.predicted
    if measured.verdict is Verdict.FAIL:
        text = (
            "correct or not, this pair is refused a rollout on cost: speculation runs at "
            f"{measured.interval.estimate:.2f}x of the target alone, below {plan.minimum_speedup:.2f}x; {_advice(measured)}"
        )
        return (Finding(text=text),)
    now = predicted[plan.num_speculative_tokens]
    if best.num_speculative_tokens == 0 or predicted[best.num_speculative_tokens].low <= now.high:
        return ()
    text = (
        f"{best.num_speculative_tokens} speculative tokens are predicted to be faster: {best.speedup:.2f}x, against "
        f"{now.estimate:.2f}x with {plan.num_speculative_tokens}"
    )
    return (Finding(text=text, severity=Verdict.PASS),)


def _advice(measured: _Measured) -> str:
    best, plan, verdict = measured.best, measured.plan, measured.verdict
    number = best.num_speculative_tokens
    if number == 0:
        loss = "speculation is a loss with this draft at every number of speculative tokens: take a smaller or a better draft"
        return "" if verdict is Verdict.PASS else loss
    named = f"the best prediction is {best.speedup:.2f}x, with {number} speculative tokens"
    if verdict is Verdict.PASS:
        return named
    if number != plan.num_speculative_tokens and best.speedup > plan.minimum_speedup:
        named += f", so try --num-speculative-tokens {number}"
    elif verdict is Verdict.FAIL:
        named += ": take a smaller or a better draft"
    again = "; measure again on a quieter machine, or with more cost_repeats (--budget deep)"
    return named if verdict is Verdict.FAIL else named + again


def _figures(measured: _Measured) -> dict[str, float | int | str]:
    """Named figures of the clock, and of the prediction."""
    costs, timings, drafts = measured.costs, measured.timings, measured.plan.num_speculative_tokens
    prediction, predicted = measured.predictions[drafts], measured.predicted[drafts]
    return {
        "measured_speedup": measured.interval.estimate,
        "measured_speedup_low": measured.interval.low,
        "measured_speedup_high": measured.interval.high,
        "predicted_speedup": predicted.estimate,
        "predicted_speedup_low": predicted.low,
        "predicted_speedup_high": predicted.high,
        "best_num_speculative_tokens": measured.best.num_speculative_tokens,
        "best_predicted_speedup": measured.best.speedup,
        "tokens_per_step": prediction.tokens_per_step,
        "target_calls_per_token": 1 / prediction.tokens_per_step,
        "target_pass_ms": costs.target_ms[1],
        "target_pass_g_plus_1_ms": costs.target_ms[drafts + 1],
        "draft_pass_ms": costs.draft_ms,
        "cost_ratio": costs.cost_ratio,
        "verification_ratio": costs.verification_ratio(drafts),
        "alone_tokens_per_s": len(timings.alone_s) / sum(timings.alone_s),
        "speculative_tokens_per_s": len(timings.speculative_s) / sum(timings.speculative_s),
        "raw_alone_ms_per_token": ", ".join(f"{1e3 * each:.2f}" for each in timings.alone_s),
        "raw_speculative_ms_per_token": ", ".join(f"{1e3 * each:.2f}" for each in timings.speculative_s),
    }


def _memory(subject: Subject) -> dict[str, float | int | str]:
    """Weights and KV cache of each model, and the peak so far: of the device, or else of the process."""
    figures: dict[str, float | int | str] = {}
    loaded = (subject.pair.target, subject.pair.draft) if subject.pair is not None else ()
    for role, each in zip(("target", "draft"), loaded, strict=False):
        if each is not None:
            figures[f"{role}_memory_bytes"] = each.model.memory_bytes
            figures |= {f"{role}_kv_cache_per_token_bytes": size for size in (kv_bytes_per_token(each),) if size}
    if subject.target.device.type == "cuda":
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(subject.target.device)
    elif sys.platform != "win32":
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures["peak_memory_bytes"] = kilobytes * (1 if sys.platform == "darwin" else 1024)
    return figures


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    """Keys and values of one token in every layer; 0 where the configuration doesn't say."""
    config = loaded.config.get_text_config(decoder=True)
    heads, width, layers = (
        getattr(config, name, None) or 0 for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or width // max(1, heads)
    return int(2 * layers * of_keys * size * loaded.model.dtype.itemsize)


def _speedup_plot(measured: _Measured) -> Plot:
    numbers = tuple(map(float, measured.predicted))

    def series(label: str, intervals: dict[int, Interval]) -> Series:
        each = intervals.values()
        return Series(
            label=label,
            x=tuple(map(float, intervals)),
            y=tuple(one.estimate for one in each),
            low=tuple(one.low for one in each),
            high=tuple(one.high for one in each),
        )

    return Plot(
        id="cost/speedup",
        title="Speed-up against number of speculative tokens",
        x_label="speculative tokens",
        y_label="speed-up over the target alone",
        kind=PlotKind.LINE,
        series=(
            series("predicted from single passes", measured.predicted),
            series("measured", {measured.plan.num_speculative_tokens: measured.interval}),
            Series(label="wanted", x=(numbers[0], numbers[-1]), y=(measured.plan.minimum_speedup,) * 2, dashed=True),
        ),
        caption="Below the dashed line speculation does not pay.",
    )


def _pass_plot(costs: Costs) -> Plot:
    blocks = tuple(float(block) for block in costs.target_ms)
    return Plot(
        id="cost/passes",
        title="Time of one pass, over that of one token of the target",
        x_label="tokens in the block",
        y_label="T(k) / T(1)",
        kind=PlotKind.LINE,
        series=(
            Series(label="target", x=blocks, y=tuple(ms / costs.target_ms[1] for ms in costs.target_ms.values())),
            Series(label="draft, one token", x=(blocks[0], blocks[-1]), y=(costs.cost_ratio,) * 2, dashed=True),
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
