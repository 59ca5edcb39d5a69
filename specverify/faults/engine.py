"""Planted faults of whole engines: each changes what the sound fake is asked, answers or tells, never how it decodes.

So a cell that misses one is blind to that class of public bug in any engine. A fault holds a memory of its own, so plant
it anew for each run.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specverify.engines.fake import letters
from specverify.errors import PlanError, PromptError
from specverify.faults.engine_fault import (
    EngineFault,
    Faulty,
    asked_otherwise,
    cut,
    each,
    fault,
    sound,
    under,
    with_params,
)
from specverify.faults.engine_text import TEXT_FAULTS
from specverify.records import DecodeCounters, DecodeRequest, DecodeStep, DecodeTrace, FinishReason, Verdict, count
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from specverify.faults.engine_fault import Requests, Traces

__all__ = ["ENGINE_FAULTS", "EngineFault", "Faulty", "find_engine_fault"]


def find_engine_fault(name: str) -> EngineFault:
    """The fault of that name. Raises `PlanError` with the nearest name."""
    known = {one.name: one for one in ENGINE_FAULTS}
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        msg = f"there is no engine fault named '{name}'; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(known)}"
        raise PlanError(msg)
    return known[name]


# ----------------------------------------------------------------------------------------------------- stop and length


def _passed_over(name: str, engine: Faulty, requests: Requests) -> Traces:
    """Ends of a kind are seen only where a block of four ends."""
    nothing: dict[str, Any] = {name: ()}
    blind = [replace(one, params=replace(one.params, **nothing)) for one in requests]
    for trace in under(requests, engine.inner.decode(blind)):
        ends = getattr(trace.request.params, name)
        seen = [at for at, token in enumerate(trace.token_ids) if token in ends and at % 4 == 3]
        finish = FinishReason.EOS if name == "eos_token_ids" else FinishReason.STOP
        least = trace.request.params.min_new_tokens if name == "eos_token_ids" else 0
        at = next((at for at in seen if at >= least), None)
        yield trace if at is None else cut(trace, at + 1, finish)


def _string_late(engine: Faulty, requests: Requests) -> Traces:
    blind = [replace(one, params=replace(one.params, stop_strings=())) for one in requests]
    for trace in under(requests, engine.inner.decode(blind)):
        places = range(len(trace.token_ids))
        stops = trace.request.params.stop_strings
        at = next((at for at in places if any(stop in letters(trace.token_ids[: at + 1]) for stop in stops)), None)
        yield trace if at is None or at + 2 > len(trace.token_ids) else cut(trace, at + 2, FinishReason.STOP)


def _past_limit(engine: Faulty, requests: Requests) -> Traces:
    room = engine.inner.target.max_length
    longer = [
        replace(one, params=replace(one.params, max_new_tokens=one.params.max_new_tokens + 1))
        if len(one.prompt_ids) + one.params.max_new_tokens < room
        else one
        for one in requests
    ]
    return under(requests, engine.inner.decode(longer))


def _limit_called_eos(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    del engine
    return replace(trace, finish=FinishReason.EOS if trace.finish is FinishReason.LENGTH else trace.finish)


# ----------------------------------------------------------------------------------------------------- batch and seeds


def _first_params(engine: Faulty, requests: Requests) -> Traces:
    """Temperature and truncation of the batch's first row apply to all of it."""
    first = requests[0].params if requests else None
    names = ("temperature", "top_k", "top_p", "min_p")
    shared = {name: getattr(first, name) for name in names}
    return under(requests, engine.inner.decode([replace(r, params=replace(r.params, **shared)) for r in requests]))


def _temperature_before(engine: Faulty, requests: Requests) -> Traces:
    """A sampled row's logits are divided by the temperature of the sampled row before it."""
    sampled = [one.params.temperature for one in requests if not one.params.greedy]
    shifted = iter(sampled[:1] + sampled[:-1])
    asked = [
        one if one.params.greedy else replace(one, params=replace(one.params, temperature=next(shifted)))
        for one in requests
    ]
    return under(requests, engine.inner.decode(asked))


def _swapped(engine: Faulty, requests: Requests) -> Traces:
    traces = list(engine.inner.decode(requests))
    if len(requests) > 1:
        first, second = traces[0], traces[-1]
        traces[0] = replace(second, request=first.request, sample=first.sample)
        traces[-1] = replace(first, request=second.request, sample=second.sample)
    return traces


def _doubles_share_seed(engine: Faulty, requests: Requests) -> Traces:
    seeds: dict[object, int] = {}
    shared = [replace(one, seed=seeds.setdefault((one.prompt_ids, one.params), one.seed)) for one in requests]
    return under(requests, engine.inner.decode(shared))


def _seed_ignored(engine: Faulty, requests: Requests) -> Traces:
    engine.memory["asked"] = engine.memory.get("asked", 0) + 1
    others = [replace(one, seed=one.seed + 1_000_003 * engine.memory["asked"]) for one in requests]
    return under(requests, engine.inner.decode(others))


def _samples_alike(engine: Faulty, requests: Requests) -> Traces:
    singles = engine.inner.decode([replace(one, num_samples=1) for one in requests])
    for request, trace in zip(requests, singles, strict=True):
        yield from (replace(trace, request=request, sample=sample) for sample in range(request.num_samples))


def _alike_in_pairs(engine: Faulty, requests: Requests) -> Traces:
    """The second of two samples is the first once more."""
    before: DecodeTrace | None = None
    for trace in engine.inner.decode(requests):
        if trace.sample % 2 and before is not None:
            yield replace(before, request=trace.request, sample=trace.sample)
        else:
            yield trace
        before = trace


def _sampled_by_neighbours(engine: Faulty, requests: Requests) -> Traces:
    """A row at temperature 0 is sampled where another row is."""
    if all(one.params.greedy for one in requests):
        return engine.inner.decode(requests)
    return with_params(temperature=1.0)(engine, requests)


def _more_than_slots_lost(engine: Faulty, requests: Requests) -> Traces:
    traces = list(engine.inner.decode(requests))
    return traces[:-1] if len(requests) == 40 else traces


def _mixed(requests: Requests) -> bool:
    return len({one.seeded for one in requests}) > 1


def _unseeded_alike(engine: Faulty, requests: Requests) -> Traces:
    return under(
        requests, engine.inner.decode([one if one.seeded else replace(one, seeded=True, seed=7) for one in requests])
    )


def _unseeded_is_one_token(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    del engine
    return trace if trace.request.seeded else replace(trace, token_ids=(1,) * len(trace.token_ids))


def _unseeded_moves_seeded(engine: Faulty, requests: Requests) -> Traces:
    moved = [replace(one, seed=one.seed + 1) for one in requests] if _mixed(requests) else requests
    return under(requests, engine.inner.decode(moved))


# ---------------------------------------------------------------------------------------------------- cache and context


def _stale(engine: Faulty, requests: Requests) -> Traces:
    """The last slot of a finished request, kept for the next turn, holds another token's values."""
    known: set[tuple[int, ...]] = engine.memory.setdefault("finished", set())
    vocab_size = engine.inner.target.vocab_size

    def poisoned(one: DecodeRequest) -> DecodeRequest:
        cached = max((len(text) for text in known if one.prompt_ids[: len(text)] == text), default=0)
        if not cached or cached == len(one.prompt_ids):
            return one
        ids = list(one.prompt_ids)
        ids[cached - 1] = (ids[cached - 1] + 1) % vocab_size
        return replace(one, prompt_ids=tuple(ids))

    traces = list(under(requests, engine.inner.decode([poisoned(one) for one in requests])))
    known.update(t.request.prompt_ids + t.token_ids[:-1] for t in traces if len(t.token_ids) > 1)
    return traces


def _overrun(engine: Faulty, requests: Requests) -> Traces:
    """What doesn't fit is shifted out at the front without a word, and the text goes on."""
    room = engine.inner.target.max_length

    def shifted(one: DecodeRequest) -> DecodeRequest:
        over = len(one.prompt_ids) + one.params.max_new_tokens - room
        return replace(one, prompt_ids=one.prompt_ids[over:]) if over > 0 else one

    return under(requests, engine.inner.decode([shifted(one) for one in requests]))


def _poisoned_by_overlong(engine: Faulty, requests: Requests) -> Traces:
    try:
        traces = list(engine.inner.decode(requests))
    except PromptError:
        engine.memory["poisoned"] = True
        raise
    if engine.memory.get("poisoned"):
        changed = [replace(one, prompt_ids=(*one.prompt_ids[:-1], 1)) for one in requests]
        return under(requests, engine.inner.decode(changed))
    return traces


def _crash(engine: Faulty, requests: Requests) -> Traces:
    engine.memory["asked"] = engine.memory.get("asked", 0) + len(requests)
    if engine.memory["asked"] >= 20 and not engine.memory.get("crashed"):
        engine.memory["crashed"] = True
        msg = "slot index out of range"
        raise RuntimeError(msg)
    return engine.inner.decode(requests)


def _id_past_vocabulary(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    engine.memory["answers"] = engine.memory.get("answers", 0) + 1
    if engine.memory["answers"] % 50 or not trace.token_ids:
        return trace
    return replace(trace, token_ids=(*trace.token_ids[:-1], engine.inner.target.vocab_size + 2))


# ---------------------------------------------------------------------------------------------------------- the law


def _draft_answers(engine: Faulty, requests: Requests) -> Traces:
    """Every fourth request is answered by the draft alone."""
    inner, draft = engine.inner, engine.inner.draft
    assert draft is not None
    alone = replace(inner.inner, decoder=replace(inner.inner.decoder, target=draft))
    for request in requests:
        wrong = request.seed % 4 == 0 and not request.params.greedy
        yield from (alone if wrong else inner).decode([request]) if wrong else inner.decode([request])


def _greedy_verification(engine: Faulty, requests: Requests) -> Traces:
    return with_params(temperature=0)(engine, requests)


def _stale_without_draft(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    """A step that drafts nothing, after one that accepted, reads the state from before the accepted tokens."""
    place, accepted = 0, 0
    for step in trace.steps:
        if accepted and not step.num_draft_tokens:
            other = (trace.token_ids[place] + 1) % engine.inner.target.vocab_size
            return replace(trace, token_ids=(*trace.token_ids[:place], other, *trace.token_ids[place + 1 :]))
        accepted, place = step.num_accepted_tokens, place + step.num_emitted_tokens
    return trace


# ------------------------------------------------------------------------------------------- counters, logs and silence


def _bonus_counted(counters: DecodeCounters) -> DecodeCounters:
    return replace(counters, num_accepted_tokens=counters.num_accepted_tokens + (counters.num_drafts or 0))


def _first_missed(counters: DecodeCounters) -> DecodeCounters:
    per_pos = counters.num_accepted_tokens_per_pos[1:]
    return replace(counters, num_accepted_tokens=sum(per_pos), num_accepted_tokens_per_pos=per_pos)


def _nothing_counted(counters: DecodeCounters) -> DecodeCounters:
    del counters
    return count(())


def _draft_logprobs(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    assert engine.inner.draft is not None
    start = len(trace.request.prompt_ids) - 1
    rows = engine.inner.draft.logits([trace.request.prompt_ids + trace.token_ids])[0, start:-1].log_softmax(-1)
    found = rows.gather(1, torch.tensor(trace.token_ids)[:, None])[:, 0]
    return replace(trace, logprobs=tuple(found.tolist()))


def _processed_logprobs(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    ids, start = trace.request.prompt_ids + trace.token_ids, len(trace.request.prompt_ids)
    law = probabilities(
        engine.inner.target.logits([ids])[:, start - 1 : -1],
        [trace.request.params],
        token_ids=torch.tensor([ids]),
        prefix_lengths=torch.arange(start, len(ids))[None],
        prompt_lengths=torch.tensor([start]),
    )[0]
    found = law.gather(1, torch.tensor(trace.token_ids)[:, None])[:, 0].log()
    return replace(trace, logprobs=tuple(found.tolist()))


def _shifted_logprobs(engine: Faulty, trace: DecodeTrace) -> DecodeTrace:
    del engine
    return replace(trace, logprobs=(0.0, *trace.logprobs[:-1])[: len(trace.token_ids)])


def _thrown_away(engine: Faulty, requests: Requests) -> Traces:
    """The target alone answers, beside drafts that nobody looks at."""
    drafted = DecodeStep(num_draft_tokens=3, num_accepted_tokens=0, num_emitted_tokens=1)
    alone = engine.inner.decode([replace(one, speculation=False) for one in requests])
    for trace in under(requests, alone):
        yield replace(trace, steps=(drafted,) * len(trace.token_ids))


_silent = asked_otherwise(lambda one: replace(one, speculation=False))


ENGINE_FAULTS: tuple[EngineFault, ...] = (
    fault("eos-passed-over", "stopping", partial(_passed_over, "eos_token_ids"), "an EOS inside a block does not end the text"),
    fault("stop-id-passed-over", "stopping", partial(_passed_over, "stop_token_ids"), "a stop id inside a block does not end the text"),
    fault("string-one-late", "stop_strings", _string_late, "a stop string ends the text one token late"),
    fault("least-length-ignored", "stopping", with_params(min_new_tokens=0), "an EOS ends a text before its least length"),
    fault("past-the-limit", "stopping", _past_limit, "one token more than asked is emitted"),
    fault("limit-called-eos", "stopping", each(_limit_called_eos), "a text that was cut off says that it ended"),
    fault("parameters-of-first-row", "neighbours", _first_params, "the first row's temperature applies to the batch"),
    fault("temperature-of-row-before", "neighbours", _temperature_before, "a sampled row has the temperature of the one before"),
    fault("samples-alike-in-pairs", "neighbours", _alike_in_pairs, "two samples of a request share their randomness"),
    fault("answers-swapped", "greedy", _swapped, "two requests of a batch get each other's answer"),
    fault("doubles-share-seed", "reproducibility", _doubles_share_seed, "duplicates in a batch share their randomness"),
    fault("seed-ignored", "reproducibility", _seed_ignored, "the same seed gives another text"),
    fault("unseeded-alike", "neighbours", _unseeded_alike, "rows without a seed share their randomness"),
    fault("unseeded-is-one-token", "neighbours", each(_unseeded_is_one_token), "a row without a seed says one token beside others"),
    fault("unseeded-moves-seeded", "reproducibility", _unseeded_moves_seeded, "a row without a seed moves the draws of rows with one"),
    fault("samples-alike", "lossless", _samples_alike, "the n samples of a request are one"),
    fault("greedy-row-sampled", "neighbours", _sampled_by_neighbours, "a sampled neighbour makes a greedy row sampled"),
    fault("request-lost", "neighbours", _more_than_slots_lost, "more requests than slots: one is never answered"),
    fault("stale-prefix-cache", "prefix_cache", _stale, "the last cached slot holds a rejected draft's values"),
    fault("context-overrun", "context", _overrun, "past the last position the text goes on without a word"),
    fault("overlong-poisons", "context", _poisoned_by_overlong, "one request over the limit spoils all later ones"),
    fault("crash", "drafting", _crash, "the engine breaks on its twentieth request"),
    fault("id-past-vocabulary", "vocabulary", each(_id_past_vocabulary), "a padded row of the output layer is emitted"),
    fault("draft-answers", "lossless", _draft_answers, "some requests are answered by the draft alone"),
    fault("always-greedy", "lossless", _greedy_verification, "verification is greedy whatever the temperature"),
    fault("stale-without-draft", "greedy", each(_stale_without_draft), "a step without a draft, after one that accepted, reads a stale state"),
    fault("temperature-ignored", "parameters", asked_otherwise(
        lambda one: one if one.params.greedy else replace(one, params=replace(one.params, temperature=1.0))
    ), "the temperature reaches one side only"),
    fault("cold-is-greedy", "parameters", asked_otherwise(
        lambda one: replace(one, params=replace(one.params, temperature=0.0)) if one.params.temperature <= 0.5 else one
    ), "a low temperature is taken for greedy"),
    fault("temperature-capped", "parameters", asked_otherwise(
        lambda one: replace(one, params=replace(one.params, temperature=min(one.params.temperature, 1.0)))
    ), "a temperature above 1 is cut to 1"),
    fault("top-k-ignored", "parameters", with_params(top_k=0), "top-k is dropped without a word"),
    fault("top-p-ignored", "parameters", with_params(top_p=1.0), "top-p is dropped without a word"),
    fault("penalty-ignored", "parameters", with_params(repetition_penalty=1.0), "the penalty is dropped without a word"),
    fault("min-p-ignored", "parameters", with_params(min_p=0.0), "min-p is dropped without a word"),
    fault("no-repeat-ignored", "parameters", with_params(no_repeat_ngram_size=0), "repeats are not kept out, without a word"),
    fault("ban-ignored", "parameters", with_params(banned_token_ids=()), "banned ids are dropped without a word"),
    fault("bonus-counted-accepted", "counters", sound, "the target's own token counts as accepted", count=_bonus_counted),
    fault("first-token-missed", "counters", sound, "the first accepted token of a draft is not counted", count=_first_missed),
    fault("draft-logprobs", "logprobs", each(_draft_logprobs), "log-probabilities are the draft's"),
    fault("processed-logprobs", "logprobs", each(_processed_logprobs), "log-probabilities are of the processed law"),
    fault("shifted-logprobs", "logprobs", each(_shifted_logprobs), "log-probabilities are shifted by one"),
    fault("drafts-thrown-away", "drafting", _thrown_away, "speculation costs its drafts and takes none of them"),
    fault("nothing-drafted", "drafting", _silent, "speculation is off without a word", count=_nothing_counted, verdict=Verdict.INCONCLUSIVE),
    *TEXT_FAULTS,
)  # fmt: skip
"""What can be wrong with a whole engine."""
