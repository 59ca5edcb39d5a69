"""The reference decoder on tables: it ends where it must, a batch is its rows, and matching gives the target's text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import TREES, DraftModel, PromptLookup, ScriptedDrafts, drafter_for
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, count
from specverify.verification.chain import greedy, sample_and_match
from specverify.verification.rules import RULES

VOCAB_SIZE = 4
TARGET = random_table(VOCAB_SIZE, 9, seed=0)
DRAFT = random_table(VOCAB_SIZE, 9, seed=1)
DECODER = Decoder(
    target=TARGET,
    drafter=DraftModel(DRAFT, VOCAB_SIZE),
    num_speculative_tokens=3,
    detokenize=lambda ids: "".join("abcd"[token] for token in ids),
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=7)


def request(prompt: tuple[int, ...] = (0, 1), *, seed: int = 0, samples: int = 1, **changed: object) -> DecodeRequest:
    """One request."""
    params = replace(SamplingParams(max_new_tokens=6), **changed)
    return DecodeRequest(id=f"{prompt}-{seed}", prompt_ids=prompt, params=params, seed=seed, num_samples=samples)


def decode(decoder: Decoder, *requests: DecodeRequest, speculation: bool = True) -> list[DecodeTrace]:
    """Traces in the order of the requests and samples."""
    rows = [Row(one, sample) for one in requests for sample in range(one.num_samples)]
    algorithm = speculative if speculation else autoregressive
    traces = {Row(trace.request, trace.sample): trace for trace in algorithm(decoder, rows)}
    assert len(traces) == len(rows)
    return [traces[row] for row in rows]


def greedy_text(prompt: tuple[int, ...], length: int, target: object = TARGET) -> list[int]:
    """The most probable token after each prefix, literally."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(target.row(ids).argmax()))
    return ids[len(prompt) :]


def ruled(rule: str, draft: TableModel = DRAFT) -> Decoder:
    """The decoder with this rule, and the drafter that is right for it."""
    named = RULES[rule]
    drafter = drafter_for(named.drafts, draft, VOCAB_SIZE, branching=(2, 2, 1))
    return replace(DECODER, rule=named.rule, drafts=named.drafts, drafter=drafter)


def guessing(text: list[int], prompt: int, correct: int, length: int = 3) -> ScriptedDrafts:
    """Drafts `length` ids of which the first `correct` are those of `text`."""

    def guess(tokens: list[int], step: int) -> list[int]:
        del step
        rest = text[len(tokens) - prompt :][:length]
        return [token if place < correct else (token + 1) % VOCAB_SIZE for place, token in enumerate(rest)]

    return ScriptedDrafts(guess, VOCAB_SIZE)


VARIED = next(
    prompt
    for prompt in ((a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE))
    if len(set(greedy_text(prompt, 4))) == 4
)
"""A prompt whose first four greedy tokens differ, so that a stop can be put on each."""


@pytest.mark.parametrize("rule", ["chain", "match", "greedy"])
@pytest.mark.parametrize("correct", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["eos", "stop", "string"])
def test_a_stop_at_every_offset_ends_the_text(rule: str, correct: int, at: int, kind: str) -> None:
    """EOS, stop id or stop string, as an accepted draft, a residual or a bonus: emitted, and nothing after it."""
    text = greedy_text(VARIED, 7)
    stops: dict[str, object] = {
        "eos": {"eos_token_ids": (text[at],)},
        "stop": {"stop_token_ids": (text[at],)},
        "string": {"stop_strings": ("".join("abcd"[token] for token in text[max(0, at - 1) : at + 1]),)},
    }
    decoder = replace(DECODER, rule=RULES[rule].rule, drafter=guessing(text, 2, correct))
    asked = replace(request(VARIED), params=replace(GREEDY, **stops[kind]))
    for speculation in (True, False):
        [trace] = decode(decoder, asked, speculation=speculation)
        assert trace.token_ids == tuple(text[: at + 1])
        assert trace.finish is (FinishReason.EOS if kind == "eos" else FinishReason.STOP)
        assert sum(step.num_emitted_tokens for step in trace.steps) == at + 1


def test_the_first_of_two_stops_in_a_block_decides() -> None:
    """An EOS after a stop id in the same accepted block is never reached, and the other way round."""
    text = greedy_text(VARIED, 7)
    decoder = replace(DECODER, drafter=guessing(text, 2, 3))
    first, second = (text[0],), (text[1],)
    [trace] = decode(
        decoder, replace(request(VARIED), params=replace(GREEDY, eos_token_ids=first, stop_token_ids=second))
    )
    assert (trace.token_ids, trace.finish) == (first, FinishReason.EOS)
    [trace] = decode(
        decoder, replace(request(VARIED), params=replace(GREEDY, eos_token_ids=second, stop_token_ids=first))
    )
    assert (trace.token_ids, trace.finish) == (first, FinishReason.STOP)


def test_drafts_dropped_after_a_stop_are_not_accepted_tokens() -> None:
    """Three drafts pass the rule, the first is an EOS: one accepted token is counted, and it is the one emitted."""
    text = greedy_text(VARIED, 7)
    decoder = replace(DECODER, drafter=guessing(text, 2, 3))
    [trace] = decode(decoder, replace(request(VARIED), params=replace(GREEDY, eos_token_ids=(text[0],))))
    counters = count([trace])
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 1)
    assert trace.steps[0].num_emitted_tokens == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("rule", RULES)
def test_the_limit_is_reached_and_never_passed(rule: str, limit: int) -> None:
    """With drafts, without, and where a whole block would pass it; the last token needs no draft."""
    decoders = [ruled(rule, TARGET), ruled(rule)]
    if RULES[rule].drafts not in TREES:
        decoders.append(replace(decoders[0], drafter=PromptLookup(VOCAB_SIZE)))
    for decoder in decoders:
        [trace] = decode(decoder, request(max_new_tokens=limit))
        assert len(trace.token_ids) == limit
        assert trace.finish is FinishReason.LENGTH
        before = 0
        for step in trace.steps:
            room = limit - before - 1
            assert step.num_draft_tokens <= (room if RULES[rule].drafts not in TREES else 10 * min(room, 1))
            assert step.num_accepted_tokens <= room
            before += step.num_emitted_tokens


def mixed() -> list[DecodeRequest]:
    """Prompts, parameters, seeds, limits, samples and stops that all differ."""
    return [
        request((0, 1), seed=1, samples=3),
        request((3,), seed=2, temperature=0.7, top_k=3),
        request((2, 2, 1), seed=3, temperature=0, max_new_tokens=4),
        request((0, 1), seed=4, repetition_penalty=1.5, max_new_tokens=1),
        request((1,), seed=5, eos_token_ids=(2,), min_new_tokens=2),
        request((1,), seed=6, stop_strings=("ab", "d"), no_repeat_ngram_size=2, max_new_tokens=5),
        request((3, 0, 2), seed=-7, min_p=0.2, banned_token_ids=((1,), (2, 3))),
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("speculation", [True, False])
def test_a_ragged_batch_is_its_rows_alone(rule: str, speculation: bool) -> None:
    """Tokens, reason and steps of every row are those that it has by itself, in any order of the batch."""
    decoder = ruled(rule)
    together = decode(decoder, *mixed(), speculation=speculation)
    alone = [trace for one in mixed() for trace in decode(decoder, one, speculation=speculation)]
    assert together == alone
    backwards = decode(decoder, *mixed()[::-1], speculation=speculation)
    assert {(trace.request.id, trace.sample): trace for trace in backwards} == {
        (trace.request.id, trace.sample): trace for trace in together
    }


@pytest.mark.parametrize(
    "drafter", [DraftModel(DRAFT, VOCAB_SIZE), PromptLookup(VOCAB_SIZE), DraftModel(TARGET, VOCAB_SIZE)]
)
def test_sample_and_match_says_what_the_target_alone_says(drafter: DraftModel | ScriptedDrafts) -> None:
    """Token for token with the same seed, whatever the parameters and whoever drafts."""
    decoder = replace(DECODER, rule=sample_and_match, drafter=drafter)
    requests = [*mixed(), *(request((seed % 4,), seed=seed, max_new_tokens=7) for seed in range(100, 164))]
    on, off = decode(decoder, *requests), decode(decoder, *requests, speculation=False)
    assert [(trace.token_ids, trace.finish) for trace in on] == [(trace.token_ids, trace.finish) for trace in off]
    assert count(on).num_accepted_tokens > 0


@pytest.mark.parametrize("rule", [name for name, named in RULES.items() if named.lossless])
def test_greedy_requests_say_what_the_target_alone_says(rule: str) -> None:
    """At temperature 0 every lossless rule is exact, and the text is the literal argmax of the table."""
    requests = [replace(request((a, b)), params=GREEDY) for a in range(4) for b in range(4)]
    on = decode(ruled(rule), *requests)
    for one, trace in zip(requests, on, strict=True):
        assert list(trace.token_ids) == greedy_text(one.prompt_ids, 7)


def test_greedy_verification_of_a_sampled_request_is_another_text() -> None:
    """A known bug, planted: the tests above would not see it at temperature 0, sampling does."""
    requests = [request((seed % 4,), seed=seed, samples=2) for seed in range(20)]
    texts = [trace.token_ids for trace in decode(replace(DECODER, rule=greedy), *requests)]
    assert texts[::2] == texts[1::2]
    texts = [trace.token_ids for trace in decode(DECODER, *requests)]
    assert texts[::2] != texts[1::2]


def test_one_token_prompts_work() -> None:
    """Nothing is prefilled; the first step feeds the whole prompt."""
    traces = decode(DECODER, *(request((token,), seed=token) for token in range(4)))
    assert all(len(trace.token_ids) == 6 for trace in traces)


def test_steps_add_up_to_the_text() -> None:
    """Emitted tokens of all steps are the text, an accepted token is a drafted one, and one more is emitted at most."""
    for trace in decode(DECODER, *mixed()):
        assert sum(step.num_emitted_tokens for step in trace.steps) == len(trace.token_ids)
        for step in trace.steps:
            assert step.num_accepted_tokens <= step.num_draft_tokens
            assert step.num_accepted_tokens <= step.num_emitted_tokens <= step.num_accepted_tokens + 1


def test_other_seeds_and_samples_say_other_things() -> None:
    """The seed and the sample's number both count, and nothing else does."""
    traces = decode(DECODER, *(request(seed=seed, samples=8) for seed in range(8)))
    texts = {trace.token_ids for trace in traces}
    assert len(texts) > 32
    renamed = [replace(request(seed=seed, samples=8), id="other") for seed in range(8)]
    rows = [Row(one, sample) for one in renamed for sample in range(8)]
    again = {(trace.request.seed, trace.sample): trace.token_ids for trace in speculative(DECODER, rows)}
    assert again == {(trace.request.seed, trace.sample): trace.token_ids for trace in traces}
    assert torch.is_inference_mode_enabled() is False
