"""Cells on what an engine tells of itself: that it drafts, its ids, its counters, its log-probabilities."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from specverify.checks.counters import impossible_counters
from specverify.checks.noise import measured_noise
from specverify.conformance.asking import Seen, cell, drafted
from specverify.engines import Capability
from specverify.errors import PlanError
from specverify.records import DecodeCounters, Finding, SamplingParams, Verdict, count
from specverify.sampling import probabilities
from specverify.statistics.interval import zero_failures_bound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.conformance.asking import Asking
    from specverify.engines import Metered
    from specverify.records import DecodeRequest, DecodeTrace

__all__ = ["counted", "counters", "difference", "drafting", "logprobs", "vocabulary"]

_LEAST_MATCHES = 8
"""Places where draft and target agree at temperature 0, below which nothing follows from no acceptance."""
_HOT = SamplingParams(temperature=2.0)
_JSON_ROUNDING = 1e-3
"""What a server may round a log-probability to."""


# ----------------------------------------------------------------------------------------------------------- drafting


def _look_at_drafting(asking: Asking) -> Seen:
    params = SamplingParams(temperature=0, max_new_tokens=16, eos_token_ids=asking.subject.eos_token_ids)
    greedy = [asking.request(one.token_ids, params, name=f"greedy/{one.id}") for one in asking.subject.prompts]
    sampled = [
        asking.request(one.token_ids, replace(params, temperature=1), name=f"sampled/{one.id}")
        for one in asking.subject.prompts
    ]
    before, started = counted(asking), time.perf_counter()
    traces = asking.answers([*greedy, *sampled])
    elapsed, after = time.perf_counter() - started, counted(asking)
    tokens = sum(len(trace.token_ids) for trace in traces)
    told = difference(before, after) if before is not None and after is not None else None
    by_steps = Capability.STEPS in asking.subject.engine.capabilities and any(trace.steps for trace in traces)
    number = drafted(traces) if by_steps else told.num_draft_tokens if told is not None else None
    measured: dict[str, float | int | str] = {"on_tokens_per_s": tokens / max(elapsed, 1e-9)}
    if number is None:
        return Seen(
            summary="the engine tells neither steps nor counters, so whether it drafts is not known",
            verdict=Verdict.INCONCLUSIVE,
            advice="give the engine `counters()`, or steps in its traces; see docs/engines.md",
            num_samples=tokens,
            measurements=measured,
        )
    if not number:
        return Seen(
            summary="nothing was drafted, so nothing was shown",
            verdict=Verdict.INCONCLUSIVE,
            advice="find out why nothing is drafted: the engine may have switched speculation off without a word",
            num_samples=tokens,
            measurements=measured,
        )
    accepted = sum(s.num_accepted_tokens for t in traces for s in t.steps) if by_steps else told.num_accepted_tokens  # type: ignore[union-attr]  # one of the two is known
    measured |= {"num_draft_tokens": number, "num_accepted_tokens": accepted}
    if by_steps:
        steps = [step.num_draft_tokens for trace in traces for step in trace.steps]
        measured |= {"num_steps": len(steps), "num_steps_without_draft": steps.count(0)}
    wrong: tuple[Finding, ...] = ()
    matches = _certain_acceptances(asking, traces) if by_steps else 0
    if not accepted and matches >= _LEAST_MATCHES:
        text = (
            f"{number:,} tokens were drafted and none was accepted, though at {matches} first drafts of greedy steps target "
            "and draft have the same first choice: what is drafted is thrown away"
        )
        wrong = (Finding(text=text),)
    return Seen(
        summary=f"{number:,} tokens drafted and {accepted:,} accepted in {tokens:,} emitted",
        wrong=wrong,
        num_samples=tokens,
        advice="compare each draft with the target's token of its own position",
        measurements=measured,
    )


def _certain_acceptances(asking: Asking, traces: Sequence[DecodeTrace]) -> int:
    """Greedy steps whose first draft, if it is the draft's first choice, any rule must accept."""
    draft, target = asking.subject.draft, asking.subject.target
    told = [t for t in traces if t.request.params.greedy and t.token_ids and t.steps]
    if draft is None or not told:
        return 0
    sequences = [t.request.prompt_ids + t.token_ids for t in told]
    choices = [model.logits(sequences)[..., : target.vocab_size].argmax(-1) for model in (target, draft)]
    agree = choices[0] == choices[1]
    number = 0
    for row, trace in enumerate(told):
        place = len(trace.request.prompt_ids) - 1
        for step in trace.steps:
            number += bool(step.num_draft_tokens and agree[row, place])
            place += step.num_emitted_tokens
    return number


# --------------------------------------------------------------------------------------------------------- vocabulary


def _look_at_vocabulary(asking: Asking) -> Seen:
    """`answers` ends the cell at the first id that the target doesn't have."""
    params = replace(_HOT, max_new_tokens=16, eos_token_ids=asking.subject.eos_token_ids)
    traces = asking.answers(
        [asking.request(one.token_ids, params, name=one.id, num_samples=3) for one in asking.subject.prompts]
    )
    tokens = sum(len(trace.token_ids) for trace in traces)
    used = len({token for trace in traces for token in trace.token_ids})
    return Seen(
        summary=f"{tokens:,} tokens at temperature 2 use {used} of {asking.subject.target.vocab_size} ids, and no other",
        num_samples=tokens,
        smallest_detectable=zero_failures_bound(tokens, asking.plan.false_pass_rate),
        effect_unit="share of tokens",
    )


# ----------------------------------------------------------------------------------------------------------- counters


def counted(asking: Asking) -> DecodeCounters | None:
    """What the engine has counted so far, where it counts."""
    if Capability.COUNTERS not in asking.subject.engine.capabilities:
        return None
    return cast("Metered", asking.subject.engine).counters()


def difference(before: DecodeCounters, after: DecodeCounters) -> DecodeCounters:
    """What it counted in between."""
    earlier = (*before.num_accepted_tokens_per_pos, *[0] * len(after.num_accepted_tokens_per_pos))
    untold = before.num_drafts is None or after.num_drafts is None
    return DecodeCounters(
        num_drafts=None if untold else (after.num_drafts or 0) - (before.num_drafts or 0),
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(
            now - then for now, then in zip(after.num_accepted_tokens_per_pos, earlier, strict=False)
        ),
    )


def _look_at_counters(asking: Asking) -> Seen:
    before = counted(asking)
    if before is None and Capability.STEPS not in asking.subject.engine.capabilities:
        msg = f"{asking.subject.engine.name} tells neither counters nor steps"
        raise PlanError(msg)
    params = SamplingParams(max_new_tokens=13, eos_token_ids=asking.subject.eos_token_ids)
    traces = asking.answers(
        [asking.request(one.token_ids, params, name=one.id, num_samples=2) for one in asking.subject.prompts]
    )
    told = difference(before, cast("DecodeCounters", counted(asking))) if before is not None else None
    wrong = list(impossible_counters(traces))
    with_steps = all(trace.steps for trace in traces)
    if told is not None:
        wrong += _unlike_steps(told, count(traces)) if with_steps else ()
        wrong += _implausible(told, traces, asking.plan.num_speculative_tokens)
    nothing = (told is not None and not told.num_draft_tokens) or (told is None and not drafted(traces))
    numbers = told or count(traces)
    return Seen(
        summary="nothing was drafted, so nothing was shown"
        if nothing
        else (
            f"{numbers.num_draft_tokens:,} drafted, {numbers.num_accepted_tokens:,} accepted"
            + (
                f" in {numbers.num_drafts:,} drafts: "
                if numbers.num_drafts is not None
                else ", in how many drafts isn't told: "
            )
            + ("as the steps say" if with_steps else "possible, as far as tokens tell")
        ),
        wrong=tuple(wrong),
        verdict=Verdict.INCONCLUSIVE if nothing else Verdict.PASS,
        num_samples=sum(len(trace.token_ids) for trace in traces),
        smallest_detectable=1.0,
        effect_unit="tokens counted wrongly" if with_steps else "tokens more than there can be",
        advice="count a draft as accepted when it is emitted: neither the target's own token nor what follows a stop",
    )


def _unlike_steps(told: DecodeCounters, recounted: DecodeCounters) -> Iterator[Finding]:
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        said, is_ = getattr(told, name), getattr(recounted, name)
        if said is not None and said != is_:
            yield Finding(text=f"{name} rose by {said:,}, and the steps of the same requests add up to {is_:,}")
    longest = max(len(told.num_accepted_tokens_per_pos), len(recounted.num_accepted_tokens_per_pos))
    padded = [(*each.num_accepted_tokens_per_pos, *[0] * longest)[:longest] for each in (told, recounted)]
    if told.num_accepted_tokens_per_pos and padded[0] != padded[1]:
        yield Finding(text=f"accepted by position rose by {list(padded[0])}, and the steps add up to {list(padded[1])}")


def _implausible(told: DecodeCounters, traces: Sequence[DecodeTrace], most_drafts: int) -> Iterator[Finding]:
    """What can't be, whatever the steps were."""
    tokens, per_pos = sum(len(trace.token_ids) for trace in traces), told.num_accepted_tokens_per_pos
    if told.num_accepted_tokens > told.num_draft_tokens:
        yield Finding(text=f"{told.num_accepted_tokens:,} tokens accepted, {told.num_draft_tokens:,} drafted")
    if told.num_drafts is not None and told.num_draft_tokens > most_drafts * told.num_drafts:
        yield Finding(text=f"{told.num_draft_tokens:,} tokens in {told.num_drafts:,} drafts of at most {most_drafts}")
    drafts = told.num_drafts or 0
    if told.num_accepted_tokens + drafts > tokens + len(traces):  # each draft but a text's last adds one token
        yield Finding(
            text=f"{told.num_accepted_tokens:,} accepted and a token of the target's after each of {drafts:,} drafts "
            f"are more than the {tokens:,} tokens that were emitted"
        )
    if per_pos and (sum(per_pos) != told.num_accepted_tokens or list(per_pos) != sorted(per_pos, reverse=True)):
        yield Finding(text=f"accepted by position is {list(per_pos)}, in all {told.num_accepted_tokens:,}")


# -------------------------------------------------------------------------------------------------- log-probabilities


def _look_at_logprobs(asking: Asking) -> Seen:
    if Capability.LOGPROBS not in asking.subject.engine.capabilities:
        msg = f"{asking.subject.engine.name} reports no log-probabilities"
        raise PlanError(msg)
    usual = SamplingParams(max_new_tokens=12, eos_token_ids=asking.subject.eos_token_ids)
    sharper = replace(usual, temperature=0.5)
    taken = [usual, *([sharper] if "temperature" in asking.subject.engine.parameters else [])]
    traces = asking.answers(
        [
            asking.request(one.token_ids, params, name=f"{one.id}/temperature={params.temperature}")
            for params in taken
            for one in asking.subject.prompts
        ]
    )
    texts = [trace.request.prompt_ids + trace.token_ids for trace in traces]
    target, noise = asking.subject.target, asking.subject.engine_noise
    allowed = _JSON_ROUNDING + 4 * measured_noise(target, texts, chunk=1, engine_noise=noise).largest
    wrong, worst, number = [], 0.0, 0
    for trace in traces:
        place = f"{trace.request.id}, sample {trace.sample}"
        if len(trace.logprobs) != len(trace.token_ids):
            text = f"{len(trace.logprobs)} log-probabilities for {len(trace.token_ids)} tokens"
            wrong.append(Finding(text=text, place=place))
            continue
        if not trace.token_ids:
            continue
        raw, processed = _rescored(asking, trace)
        said = np.array(trace.logprobs)
        off = np.abs(said - raw)
        number += len(said)
        worst = max(worst, float(np.nan_to_num(off, nan=np.inf).max()))
        if not (off <= allowed).all():
            at = int(np.flatnonzero(~(off <= allowed))[0])
            hint = (
                "; that is the processed law's, not the model's" if np.allclose(said, processed, atol=allowed) else ""
            )
            text = f"token {at} ({trace.token_ids[at]}) is reported with {said[at]:.4g}, and the target gives {raw[at]:.4g}{hint}"
            wrong.append(Finding(text=text, place=place))
    return Seen(
        summary=f"{number:,} reported log-probabilities, at most {worst:.2g} from the target's own",
        wrong=tuple(wrong),
        num_samples=number,
        smallest_detectable=allowed,
        effect_unit="nats",
        advice="report the target's log-probability of the token that was emitted, from the row that it was drawn from",
    )


@torch.inference_mode()
def _rescored(asking: Asking, trace: DecodeTrace) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Log-probability of each token under the model's law, and under the law that was sampled from."""
    return tuple(
        _log_law(asking, trace.request, trace.token_ids, params) for params in (SamplingParams(), trace.request.params)
    )


def _log_law(
    asking: Asking, request: DecodeRequest, token_ids: Sequence[int], params: SamplingParams
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    sequence = (*request.prompt_ids, *token_ids)
    start, end = len(request.prompt_ids) - 1, len(sequence) - 1
    logits = asking.subject.target.logits([sequence[:-1]])[:, start:end]
    law = probabilities(
        logits,
        [params],
        token_ids=torch.tensor([sequence]),
        prefix_lengths=torch.arange(start + 1, end + 1)[None],
        prompt_lengths=torch.tensor([start + 1]),
    )[0]
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        law.gather(1, torch.tensor(token_ids)[:, None])[:, 0].log().cpu().numpy()
    )
    return found


drafting = cell("drafting", "speculation drafts, and what it drafts can be accepted", _look_at_drafting)
"""INCONCLUSIVE where nothing is drafted: silence proves nothing."""
vocabulary = cell("vocabulary", "every emitted id is one of the target's", _look_at_vocabulary)
counters = cell("counters", "the counters are those of the steps that were taken", _look_at_counters)
logprobs = cell("logprobs", "reported log-probabilities are the target's own", _look_at_logprobs)
