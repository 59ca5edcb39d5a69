"""The job: which of some drafts goes with a target, and with how many speculative tokens, at each batch size.

Each draft decodes the same requests once, with the most tokens that are asked for; that gives acceptance by position. The
target then scores what was said, which predicts the tokens a step for every smaller number (Note [Posterior acceptance]).
Passes are timed in turns for each batch size (Note [Timing]). The speed-up is tokens a step over what a step costs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.acceptance import boundaries, tokens_per_step_interval
from specverify.checks.check import asked, sampling
from specverify.checks.cost import kv_bytes_per_token, measured_costs
from specverify.context import Row
from specverify.decoding import speculative
from specverify.errors import PlanError
from specverify.records import Plot, PlotKind, Series, count
from specverify.scoring import score
from specverify.statistics.acceptance import speedup, tokens_per_step
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.statistics.interval import Interval
    from specverify.subject import EncodedPrompt, Subject
    from specverify.watch import Watch

__all__ = ["Choice", "RankedDraft", "Ranking", "pareto_plot", "rank", "sentence"]

_PROMPTS, _TOKENS, _REPEATS = 24, 48, 5


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best number of speculative tokens at one batch size; 0 where the target alone is as fast."""

    batch: int
    num_speculative_tokens: int
    speedup: float
    """Predicted from measured passes and acceptance; at 0 tokens, 1 by definition."""
    low: float
    """Ends of the 95 % interval that resamples prompts, at the median passes."""
    high: float
    speedups: tuple[float, ...]
    """For 1, 2, ... tokens."""
    cost_ratio: float
    """c: one draft pass over one target pass."""

    @property
    def loss(self) -> bool:
        """Whether no number of tokens is faster than the target alone."""
        return self.num_speculative_tokens == 0


@dataclass(frozen=True, kw_only=True)
class RankedDraft:
    """What one draft is worth."""

    name: str
    acceptance_by_position: tuple[float, ...]
    """Accepted at a position over drafts that were verified there, all before them accepted."""
    num_tokens: int
    """That this rests on."""
    memory_bytes: int
    """Weights of the draft."""
    kv_cache_per_token_bytes: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The drafts, best first by the speed-up at the first batch size."""

    target: str
    target_memory_bytes: int
    batches: tuple[int, ...]
    drafts: tuple[RankedDraft, ...]

    @property
    def loss(self) -> bool:
        """Whether speculation is a loss with every draft at every batch size."""
        return all(choice.loss for draft in self.drafts for choice in draft.choices)


def rank(
    subjects: Sequence[Callable[[], Subject]],
    names: Sequence[str],
    plan: Plan,
    *,
    batches: Sequence[int] = (1, 8, 32),
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Ranking:
    """Rank the drafts of these subjects, which share a target. The plan's number of speculative tokens is the most.

    Raises `PlanError` where no prompt leaves room for the tokens in target and draft.
    """
    watch = Silent() if watch is None else watch
    watch.stage("ranking", len(subjects))
    ranked, target, memory = [], "", 0
    for make, name in zip(subjects, names, strict=True):
        subject = make()
        assert subject.pair is not None
        target, memory = subject.pair.target.source, subject.pair.target.model.memory_bytes
        ranked.append(_ranked(subject, name, plan, batches, clock))
        watch.advance()
    watch.close()
    ranked.sort(key=lambda draft: -draft.choices[0].speedup)
    return Ranking(target=target, target_memory_bytes=memory, batches=tuple(batches), drafts=tuple(ranked))


def _ranked(subject: Subject, name: str, plan: Plan, batches: Sequence[int], clock: Callable[[], float]) -> RankedDraft:
    decoder, draft = subject.decoder, subject.draft
    assert decoder is not None
    assert draft is not None
    assert subject.pair is not None
    assert subject.pair.draft is not None
    most = plan.num_speculative_tokens
    prompts = _fitting(subject, most)
    params = replace(sampling(subject, plan), max_new_tokens=_TOKENS)
    requests = asked("rank", plan, prompts, params)
    traces = list(speculative(decoder, [Row(request, 0) for request in requests]))
    traces.sort(key=lambda trace: trace.request.id)
    scored = score(traces, target=subject.target, draft=draft, workers=subject.workers)
    posterior, starts = np.clip(scored["posterior"], 0, 1), boundaries(scored)
    tokens = [tokens_per_step(posterior, number, starts) for number in range(1, most + 1)]

    def choose(batch: int) -> Choice:
        middle = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[len(prompts) // 2].token_ids
        costs = measured_costs(subject.target, draft, middle, most=most + 1, repeats=_REPEATS, clock=clock, batch=batch)
        gains = [
            speedup(
                each, num_speculative_tokens=g, draft_cost=costs.cost_ratio, verify_cost=costs.verification_ratio(g)
            )
            for g, each in enumerate(tokens, start=1)
        ]
        best = int(np.argmax(gains)) + 1 if max(gains) > 1 else 0
        spread = (
            _scaled(tokens_per_step_interval(scored, best, seed=plan.seed), gains[best - 1]) if best else (1.0, 1.0)
        )
        return Choice(
            batch=batch,
            num_speculative_tokens=best,
            speedup=gains[best - 1] if best else 1.0,
            low=spread[0],
            high=spread[1],
            speedups=tuple(gains),
            cost_ratio=costs.cost_ratio,
        )

    return RankedDraft(
        name=name,
        acceptance_by_position=_by_position(traces, most),
        num_tokens=len(posterior),
        memory_bytes=subject.pair.draft.model.memory_bytes,
        kv_cache_per_token_bytes=kv_bytes_per_token(subject.pair.draft),
        choices=tuple(map(choose, batches)),
    )


def _scaled(tokens: Interval, gain: float) -> tuple[float, float]:
    return gain * tokens.low / tokens.estimate, gain * tokens.high / tokens.estimate


def _fitting(subject: Subject, most: int) -> tuple[EncodedPrompt, ...]:
    assert subject.draft is not None
    room = min(subject.target.max_length, subject.draft.max_length) - max(_TOKENS, most + 1)
    prompts = tuple(prompt for prompt in subject.prompts if len(prompt.token_ids) <= room)[:_PROMPTS]
    if not prompts:
        msg = f"no prompt leaves room for {max(_TOKENS, most + 1)} tokens in target and draft; give shorter ones with --prompts"
        raise PlanError(msg)
    return prompts


def _by_position(traces: Sequence[DecodeTrace], most: int) -> tuple[float, ...]:
    """Each over those that reached it; a step is left out where a draft was never verified or dropped after a stop."""
    steps = [step for trace in traces for step in trace.steps]
    reached = [
        sum(step.num_draft_tokens > at and step.num_accepted_tokens >= at for step in steps) for at in range(most)
    ]
    accepted = count(traces).num_accepted_tokens_per_pos
    return tuple(
        float(hits / all_) if all_ else float("nan")
        for hits, all_ in zip((*accepted, *(0,) * most), reached, strict=False)
    )


def sentence(ranking: Ranking) -> str:
    """What to do."""
    if ranking.loss:
        return (
            "speculation is a loss with every draft at every batch size and number of tokens: serve the target alone, or "
            "find a smaller or a better draft"
        )
    parts = []
    for place, batch in enumerate(ranking.batches):
        draft = max(ranking.drafts, key=lambda each: each.choices[place].speedup)
        choice = draft.choices[place]
        parts.append(
            f"at batch {batch} speculation is a loss"
            if choice.loss
            else f"at batch {batch} take {draft.name} with {choice.num_speculative_tokens} tokens "
            f"({choice.speedup:.2f}x [{choice.low:.2f}, {choice.high:.2f}])"
        )
    return "; ".join(parts)


def pareto_plot(ranking: Ranking) -> Plot:
    """Speed-up against the memory that a draft takes; the front is what no other draft beats in both."""
    megabytes = [draft.memory_bytes / 1e6 for draft in ranking.drafts]
    series = [
        Series(
            label=f"batch {batch}",
            x=tuple(megabytes),
            y=tuple(draft.choices[place].speedup for draft in ranking.drafts),
            low=tuple(draft.choices[place].low for draft in ranking.drafts),
            high=tuple(draft.choices[place].high for draft in ranking.drafts),
        )
        for place, batch in enumerate(ranking.batches)
    ]
    front, best = [(0.0, 1.0)], 1.0  # no draft at all costs nothing and gains nothing
    for size, draft in sorted(zip(megabytes, ranking.drafts, strict=True), key=lambda pair: pair[0]):
        if draft.choices[0].speedup > best:
            best = draft.choices[0].speedup
            front.append((size, best))
    x, y = zip(*front, strict=True)
    return Plot(
        id="rank/pareto",
        title="Speed-up against memory of the draft",
        x_label="weights of the draft, MB",
        y_label="speed-up over the target alone",
        kind=PlotKind.SCATTER,
        series=(*series, Series(label=f"front at batch {ranking.batches[0]}", x=x, y=y, dashed=True)),
        caption="A draft below 1 is a loss; one below the front is beaten by a smaller one.",
    )
