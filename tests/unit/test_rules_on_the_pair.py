"""Every rule that `--rule` names, in the reference decoder on the embedded pair: real models, real caches, trees with their mask."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import drafter_for
from specverify.models.transformers import TransformersModel
from specverify.pairs import embedded
from specverify.records import DecodeRequest, SamplingParams, count
from specverify.verification.rules import RULES

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def pair() -> tuple[TransformersModel, TransformersModel]:
    """Target and draft in float32."""
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (embedded().target, embedded().draft))
    return TransformersModel(target, "target"), TransformersModel(draft, "draft")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Four prompts of different lengths, at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(embedded().target)
    lines = embedded().prompts.read_text(encoding="utf-8").splitlines()[::16]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    texts = [tuple(tokenizer(json.loads(line)["text"])["input_ids"][:30]) for line in lines[:4]]
    return [Row(DecodeRequest(id=str(n), prompt_ids=ids, params=params, seed=n), 0) for n, ids in enumerate(texts)]


def decoder(name: str, pair: tuple[TransformersModel, TransformersModel]) -> Decoder:
    """As `--rule NAME` puts it together."""
    target, draft = pair
    drafts = RULES[name].drafts
    drafter = drafter_for(drafts, draft, target.vocab_size, branching=(3, 2, 1))
    return Decoder(target=target, drafter=drafter, rule=RULES[name].rule, drafts=drafts)


def at_zero(rows: list[Row]) -> list[Row]:
    """The same requests at temperature 0."""
    params = replace(rows[0].request.params, temperature=0)
    return [replace(row, request=replace(row.request, params=params)) for row in rows]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_the_target_says_at_temperature_0(
    name: str, pair: tuple[TransformersModel, TransformersModel], rows: list[Row]
) -> None:
    """Lossy ones, too: a point mass leaves them nothing to relax, but for an ensemble, which takes a fifth of the draft's."""
    subject, asked = decoder(name, pair), at_zero(rows)
    texts, alone = (
        {trace.request.id: trace.token_ids for trace in run(subject, asked)} for run in (speculative, autoregressive)
    )
    assert [len(text) for text in texts.values()] == [NEW_TOKENS] * len(rows)
    assert (texts == alone) == (name != "ensemble")


@pytest.mark.parametrize("name", [name for name in RULES if name != "greedy"])
def test_a_rule_accepts_and_refuses_sampled_drafts(
    name: str, pair: tuple[TransformersModel, TransformersModel], rows: list[Row]
) -> None:
    """At temperature 1, to the last token; where the draws are the position's own, bit for bit the target's text."""
    subject = decoder(name, pair)
    traces = list(speculative(subject, rows))
    assert [len(trace.token_ids) for trace in traces] == [NEW_TOKENS] * len(rows)
    counted = count(traces)
    assert 0 < counted.num_accepted_tokens < counted.num_draft_tokens
    if name in {"match", "gumbel"}:
        alone = {trace.request.id: trace.token_ids for trace in autoregressive(subject, rows)}
        assert {trace.request.id: trace.token_ids for trace in traces} == alone
