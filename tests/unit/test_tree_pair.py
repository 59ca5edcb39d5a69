"""Trees on the embedded pair: real models, real caches, and every logit that the loop used held against a fresh pass."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import TREES, DraftModel, DraftTree
from specverify.models.transformers import TransformersModel
from specverify.pairs import embedded
from specverify.records import DecodeRequest, SamplingParams, count
from specverify.verification.chain import greedy
from specverify.verification.rules import Drafts
from tests.unit.trees import rule_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.models import Session

ALLOWED = 1e-4
"""Greatest difference of two logits in float32; a wrong mask, position or path moves them by more than 1."""
NUM_PROMPTS, NEW_TOKENS = 8, 64


@pytest.fixture(scope="module")
def target() -> TransformersModel:
    """In float32."""
    return TransformersModel(AutoModelForCausalLM.from_pretrained(embedded().target), "target")


@pytest.fixture(scope="module")
def draft() -> TransformersModel:
    """In float32."""
    return TransformersModel(AutoModelForCausalLM.from_pretrained(embedded().draft), "draft")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Eight prompts of different lengths; an odd one has a repetition penalty."""
    tokenizer = AutoTokenizer.from_pretrained(embedded().target)
    lines = embedded().prompts.read_text(encoding="utf-8").splitlines()[:: 64 // NUM_PROMPTS]
    prompts = [tuple(tokenizer(json.loads(line)["text"])["input_ids"][:40]) for line in lines]
    return [
        Row(
            DecodeRequest(
                id=str(seed),
                prompt_ids=ids,
                params=SamplingParams(max_new_tokens=NEW_TOKENS, repetition_penalty=1.0 if seed % 2 else 1.1),
                seed=seed,
            ),
            0,
        )
        for seed, ids in enumerate(prompts)
    ]


@dataclass(eq=False)
class Watched:
    """A model whose sessions note the greatest difference of a cached logit from a recomputed one."""

    inner: TransformersModel
    worst: float = 0.0
    compared: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, prompts: Sequence[Sequence[int]]) -> WatchedSession:
        return WatchedSession(self, self.inner.open(prompts), [list(prompt) for prompt in prompts])


@dataclass
class WatchedSession:
    """Keeps the tokens of each row as lists beside the real session."""

    model: Watched
    inner: Session
    rows: list[list[int]]
    tree: list[list[list[int]]] = field(default_factory=list)

    @property
    def lengths(self) -> torch.Tensor:
        return self.inner.lengths

    def append(self, ids: torch.Tensor, sizes: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.inner.append(ids, sizes, parents)
        above = parents if parents is not None else torch.arange(-1, ids.shape[1] - 1).expand_as(ids)
        self.tree = []
        for held, own, count_, over in zip(self.rows, ids.tolist(), sizes.tolist(), above.tolist(), strict=True):
            prefixes: list[list[int]] = []
            for place in range(count_):
                prefixes.append([*(prefixes[over[place]] if over[place] >= 0 else held), own[place]])
            self.tree.append(prefixes)
        for row, prefixes in enumerate(self.tree):
            if prefixes and (len(prefixes[0]) + row) % 4 == 0:  # now and then, and another entry each time
                place = (len(prefixes[0]) // 4) % len(prefixes)
                expected = self.model.inner.logits([prefixes[place]])[0, -1]
                self.model.worst = max(self.model.worst, float((logits[row, place] - expected).abs().max()))
                self.model.compared += 1
        if parents is None:
            self.rows = [
                prefixes[-1] if prefixes else held for prefixes, held in zip(self.tree, self.rows, strict=True)
            ]
        return logits

    def keep(self, places: torch.Tensor, num_kept: torch.Tensor) -> None:
        self.inner.keep(places, num_kept)
        for row, (path, count_) in enumerate(zip(places.tolist(), num_kept.tolist(), strict=True)):
            if count_:
                self.rows[row] = self.tree[row][path[count_ - 1]]

    def rollback(self, lengths: torch.Tensor) -> None:
        self.inner.rollback(lengths)
        self.rows = [held[:length] for held, length in zip(self.rows, lengths.tolist(), strict=True)]

    def select(self, keep: torch.Tensor) -> None:
        self.inner.select(keep)
        self.rows = [self.rows[row] for row in keep.tolist()]


@pytest.mark.parametrize("drafts", TREES, ids=lambda way: way.name)
def test_trees_on_the_embedded_pair_use_the_logits_of_a_fresh_pass(
    target: TransformersModel, draft: TransformersModel, rows: list[Row], drafts: Drafts
) -> None:
    """64 tokens for 8 prompts, target and draft watched; sampled siblings save steps over a chain of the same depth."""
    watched = Watched(target), Watched(draft)
    decoder = Decoder(
        target=watched[0],
        drafter=DraftTree(watched[1], target.vocab_size, (3, 2, 1), drafts),
        rule=rule_for(drafts),
        drafts=drafts,
    )
    traces = list(speculative(decoder, rows))
    assert [len(trace.token_ids) for trace in traces] == [NEW_TOKENS] * NUM_PROMPTS
    for model in watched:
        assert model.compared > 30
        assert model.worst < ALLOWED
    if drafts is not Drafts.TOP_K:  # at temperature 1 the three most probable ids have little of the mass
        chain = Decoder(target=target, drafter=DraftModel(draft, target.vocab_size))
        steps = sum(len(trace.steps) for trace in traces)
        assert steps < sum(len(trace.steps) for trace in speculative(chain, rows))


def test_greedy_trees_on_the_embedded_pair_are_the_greedy_chain(
    target: TransformersModel, draft: TransformersModel, rows: list[Row]
) -> None:
    """Single children draft and accept what the chain does, step by step; any shape says what the target alone says."""
    at_zero = [
        replace(row, request=replace(row.request, params=replace(row.request.params, temperature=0))) for row in rows
    ]
    chain = Decoder(target=target, drafter=DraftModel(draft, target.vocab_size), rule=greedy)
    texts, steps = {}, {}
    for name, drafter, rule in (
        ("chain", chain.drafter, greedy),
        ("narrow", DraftTree(draft, target.vocab_size, (1, 1, 1), Drafts.TOP_K), rule_for(Drafts.TOP_K)),
        ("wide", DraftTree(draft, target.vocab_size, (3, 2, 1), Drafts.TOP_K), rule_for(Drafts.TOP_K)),
    ):
        traces = {trace.request.id: trace for trace in speculative(replace(chain, drafter=drafter, rule=rule), at_zero)}
        texts[name] = {key: trace.token_ids for key, trace in traces.items()}
        steps[name] = {
            key: [replace(step, draft_token_ids=()) for step in trace.steps] for key, trace in traces.items()
        }  # the drafts of a tree are not kept
        assert count(traces.values()).num_accepted_tokens > 0
    texts["alone"] = {trace.request.id: trace.token_ids for trace in autoregressive(chain, at_zero)}
    assert texts["chain"] == texts["narrow"] == texts["wide"] == texts["alone"]
    assert steps["chain"] == steps["narrow"]
