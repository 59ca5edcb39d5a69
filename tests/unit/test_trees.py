"""Trees through the reference decoder: the target's law exactly, whatever the shape, the parameters and the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.choices.enumerate import every_path
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import TREES, DraftModel, DraftTree
from specverify.errors import InternalError
from specverify.law import autoregressive_law, decoded_law, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, count
from specverify.sampling import probabilities
from specverify.tree import ancestors, depths, paths
from specverify.verification.chain import chain_rejection, greedy
from specverify.verification.rules import Drafts
from tests.unit.trees import rule_for

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE = 3
EXACT = 1e-12
TARGET = random_table(VOCAB_SIZE, 9, seed=0)
DRAFT = random_table(VOCAB_SIZE, 9, seed=1)
GREEDY = SamplingParams(temperature=0, max_new_tokens=7)


def tree_decoder(
    drafts: Drafts, branching: tuple[int, ...], target: TableModel = TARGET, draft: TableModel = DRAFT
) -> Decoder:
    """Trees of this shape, and the rule that is right for them."""
    return Decoder(
        target=target,
        drafter=DraftTree(draft, target.vocab_size, branching=branching, drafts=drafts),
        rule=rule_for(drafts),
        num_speculative_tokens=len(branching),
        drafts=drafts,
        detokenize=lambda ids: "".join("abcd"[token] for token in ids),
    )


def decode(decoder: Decoder, *requests: DecodeRequest, algorithm: Callable = speculative) -> list[DecodeTrace]:
    """Traces in the order of the requests and samples."""
    rows = [Row(one, sample) for one in requests for sample in range(one.num_samples)]
    traces = {Row(trace.request, trace.sample): trace for trace in algorithm(decoder, rows)}
    return [traces[row] for row in rows]


def request(prompt: tuple[int, ...] = (0, 1), *, seed: int = 0, samples: int = 1, **changed: object) -> DecodeRequest:
    """One request."""
    params = replace(SamplingParams(max_new_tokens=6), **changed)
    return DecodeRequest(id=f"{prompt}-{seed}", prompt_ids=prompt, params=params, seed=seed, num_samples=samples)


# ----------------------------------------------------------------------------------------------------------------- law
INSTANCES = {
    "random": (random_table(3, 4, seed=2), random_table(3, 4, seed=3)),
    "zeros": (random_table(3, 4, seed=4, zeros=0.4), random_table(3, 4, seed=5, zeros=0.4)),
    "equal": (random_table(3, 4, seed=6), random_table(3, 4, seed=6)),
    "nearly one-hot": (random_table(3, 4, seed=7, sharpness=8), random_table(3, 4, seed=8, sharpness=8)),
}


@pytest.mark.parametrize("branching", [(2,), (3,), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("drafts", TREES, ids=lambda way: way.name)
def test_trees_emit_the_targets_law_exactly(drafts: Drafts, branching: tuple[int, ...]) -> None:
    """Every path of whole decodes: an EOS among the ids, a limit inside a block, supports that are used up."""
    for target, draft in INSTANCES.values():
        decoder = tree_decoder(drafts, branching, target, draft)
        actual = decoded_law(decoder, max_new_tokens=2, eos_token_ids=(1,))
        assert total_variation(actual, autoregressive_law(target, max_new_tokens=2, eos_token_ids=(1,))) < EXACT


def test_three_tokens_over_two_levels_are_exact() -> None:
    """A second step after a path was kept, and siblings on both levels of the cheapest drafts."""
    target, draft = INSTANCES["random"]
    decoder = tree_decoder(Drafts.TOP_K, (2, 2), target, draft)
    actual = decoded_law(decoder, max_new_tokens=3)
    assert total_variation(actual, autoregressive_law(target, max_new_tokens=3)) < EXACT


@pytest.mark.parametrize("drawn", TREES, ids=lambda way: way.name)
@pytest.mark.parametrize("verified", [Drafts.WITH_REPLACEMENT, Drafts.WITHOUT_REPLACEMENT], ids=lambda way: way.name)
def test_a_rule_for_other_drafts_is_not_exact(drawn: Drafts, verified: Drafts) -> None:
    """What the comparison above would say of a wrong pairing, or of the right one with a law that is not the drafts' own."""
    target, draft = INSTANCES["random"]
    decoder = replace(tree_decoder(drawn, (2,), target, draft), rule=rule_for(verified))
    if drawn in {verified, Drafts.TOP_K}:
        rule = decoder.rule

        def flattened(proposal, target_probs, choices):
            laws = (proposal.draft_probs > 0) * proposal.draft_probs.sqrt()
            laws = torch.where(proposal.drafted[..., None], (laws + 0.1) / (laws + 0.1).sum(-1, keepdim=True), 0)
            return rule(replace(proposal, draft_probs=laws), target_probs, choices)

        decoder = replace(decoder, rule=flattened)
    actual = decoded_law(decoder, max_new_tokens=2)
    assert total_variation(actual, autoregressive_law(target, max_new_tokens=2)) > 1e-3


# ---------------------------------------------------------------------------------------------------- sampling parameters
PENALISED = SamplingParams(max_new_tokens=3, repetition_penalty=0.5, min_new_tokens=2, eos_token_ids=(1,))


def penalised_law(target: TableModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of the target alone, one prefix at a time; the penalty is written out, not taken from the sampler."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(params.max_new_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for said, weight in law.items():
            if said and said[-1] in params.eos_token_ids:
                longer[said] = weight
                continue
            scores = target.row((0, *said)).clone()
            for token in {0, *said}:
                scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
            if length < params.min_new_tokens:
                scores[list(params.eos_token_ids)] = -torch.inf
            for token, probability in enumerate(scores.softmax(-1).tolist()):
                if probability > 0:
                    longer[*said, token] = weight * probability
        law = longer
    return law


def emitted_law(decoder: Decoder, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """What the unchanged loop emits under these parameters, over every path."""
    asked, law = DecodeRequest(id="law", prompt_ids=(0,), params=params), {}

    def program(choices):
        rows = [Row(asked, path) for path in range(len(choices.records))]
        said.update(
            (one.sample, one.token_ids) for one in speculative(replace(decoder, choices=lambda _: choices), rows)
        )
        return torch.arange(len(rows))

    said: dict[int, tuple[int, ...]] = {}
    for path, weights in every_path(program):
        for one, weight in zip(path.tolist(), weights.tolist(), strict=True):
            law[said[one]] = law.get(said[one], 0.0) + weight
    return law


@pytest.mark.parametrize("drafts", [Drafts.TOP_K, Drafts.WITHOUT_REPLACEMENT], ids=lambda way: way.name)
def test_each_node_is_penalised_by_its_own_ancestors(drafts: Drafts) -> None:
    """A repetition penalty and a minimum length on trees: the law is that of the target alone."""
    target, draft = INSTANCES["random"]
    branching = (2, 1) if drafts is Drafts.TOP_K else (2,)
    actual = emitted_law(tree_decoder(drafts, branching, target, draft), PENALISED)
    assert total_variation(actual, penalised_law(target, PENALISED)) < EXACT


@pytest.mark.parametrize("bug", ["siblings", "no drafts"])
def test_a_node_that_sees_other_prefixes_is_not_exact(bug: str) -> None:
    """Penalised by its sibling, or by none of its ancestors: the comparison above fails."""
    target, draft = INSTANCES["random"]
    decoder = tree_decoder(Drafts.TOP_K, (2, 1), target, draft)

    def law(logits, params, *, token_ids, prefix_lengths, prompt_lengths):
        if bug == "siblings":
            token_ids = torch.where(
                torch.arange(token_ids.shape[1]) == prefix_lengths - 1, token_ids.roll(1, 0), token_ids
            )
        else:
            prefix_lengths = torch.ones_like(prefix_lengths)
        return probabilities(
            logits, params, token_ids=token_ids, prefix_lengths=prefix_lengths, prompt_lengths=prompt_lengths
        )

    actual = emitted_law(replace(decoder, law=law), PENALISED)
    assert total_variation(actual, penalised_law(target, PENALISED)) > 1e-3


# ---------------------------------------------------------------------------------------------------------------- loop
def mixed() -> list[DecodeRequest]:
    """Prompts, parameters, seeds, limits, samples and stops that all differ."""
    return [
        request((0, 1), seed=1, samples=3),
        request((2,), seed=2, temperature=0.7, top_k=2),
        request((2, 2, 1), seed=3, temperature=0, max_new_tokens=4),
        request((0, 1), seed=4, repetition_penalty=1.5, max_new_tokens=1),
        request((1,), seed=5, eos_token_ids=(2,), min_new_tokens=2),
        request((1,), seed=6, stop_strings=("ab", "c"), no_repeat_ngram_size=3, max_new_tokens=5),
        request((2, 0, 2), seed=-7, min_p=0.2, banned_token_ids=((1,), (2, 0))),
    ]


@pytest.mark.parametrize("drafts", TREES, ids=lambda way: way.name)
def test_a_ragged_batch_of_trees_is_its_rows_alone(drafts: Drafts) -> None:
    """Tokens, reason and steps of every row are those that it has by itself, in any order of the batch."""
    decoder = tree_decoder(drafts, (3, 2, 1))
    together = decode(decoder, *mixed())
    assert together == [trace for one in mixed() for trace in decode(decoder, one)]
    backwards = {(trace.request.id, trace.sample): trace for trace in decode(decoder, *mixed()[::-1])}
    assert backwards == {(trace.request.id, trace.sample): trace for trace in together}
    assert count(together).num_accepted_tokens > 0


@pytest.mark.parametrize("drafts", TREES, ids=lambda way: way.name)
def test_greedy_trees_say_what_the_target_alone_says(drafts: Drafts) -> None:
    """At temperature 0 the text is the target's; single children are the chain, step by step."""
    requests = [replace(request((a, b)), params=GREEDY) for a in range(3) for b in range(3)]
    off = decode(tree_decoder(drafts, (2, 1)), *requests, algorithm=autoregressive)
    wide, narrow = (decode(tree_decoder(drafts, shape), *requests) for shape in ((2, 2, 1), (1, 1, 1)))
    chain = decode(Decoder(target=TARGET, drafter=DraftModel(DRAFT, VOCAB_SIZE), rule=greedy), *requests)
    assert [one.token_ids for one in wide] == [one.token_ids for one in narrow] == [one.token_ids for one in off]
    shown = [tuple(replace(step, draft_token_ids=()) for step in one.steps) for one in chain]
    assert [one.steps for one in narrow] == shown  # the drafts of a tree are not kept


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["eos", "stop", "string"])
@pytest.mark.parametrize("draft", [TARGET, DRAFT], ids=["all accepted", "some accepted"])
def test_a_stop_at_every_depth_of_a_tree_ends_the_text(draft: TableModel, kind: str, at: int) -> None:
    """As an accepted node, a residual or a bonus: emitted, and nothing after it; the row's neighbour goes on."""
    prompt = next(p for p in ((a, b) for a in range(3) for b in range(3)) if len(set(greedy_text(p, 4)[:3])) == 3)
    text = greedy_text(prompt, 7)
    first = text.index(text[at])
    stops: dict[str, dict[str, object]] = {
        "eos": {"eos_token_ids": (text[at],)},
        "stop": {"stop_token_ids": (text[at],)},
        "string": {"stop_strings": ("abcd"[text[at]],)},
    }
    decoder = tree_decoder(Drafts.TOP_K, (2, 2, 1), draft=draft)
    stopped = replace(request(prompt), params=replace(GREEDY, **stops[kind]))
    [trace, other] = decode(decoder, stopped, replace(request(prompt, seed=1), params=GREEDY))
    assert trace.token_ids == tuple(text[: first + 1])
    assert trace.finish is (FinishReason.EOS if kind == "eos" else FinishReason.STOP)
    assert other.token_ids == tuple(text)


def greedy_text(prompt: tuple[int, ...], length: int) -> list[int]:
    """The most probable token after each prefix, literally."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(TARGET.row(ids).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_the_limit_bounds_the_depth_of_a_tree(limit: int) -> None:
    """It is reached and never passed, and the last token needs no draft."""
    for draft in (TARGET, DRAFT):
        [trace] = decode(tree_decoder(Drafts.WITH_REPLACEMENT, (2, 2, 1), draft=draft), request(max_new_tokens=limit))
        assert (len(trace.token_ids), trace.finish) == (limit, FinishReason.LENGTH)
        before, most = 0, {0: 0, 1: 2, 2: 6}
        for step in trace.steps:
            assert step.num_draft_tokens <= most.get(limit - before - 1, 10)
            assert step.num_accepted_tokens <= min(3, limit - before - 1)
            before += step.num_emitted_tokens


def test_a_chain_rule_refuses_a_tree() -> None:
    """It would read siblings as one text."""
    decoder = replace(tree_decoder(Drafts.TOP_K, (2,)), rule=chain_rejection)
    with pytest.raises(InternalError, match="the rule verifies chains, but the drafter proposes trees"):
        decode(decoder, request())


def test_a_wrapped_drafter_keeps_its_window() -> None:
    """Uniforms for all nodes are there, even when the drafter no longer says how many they are."""
    decoder = tree_decoder(Drafts.WITH_REPLACEMENT, (3, 2, 1))
    wrapped = replace(decoder, drafter=decoder.drafter.__call__)
    assert wrapped.max_nodes == 3 + 6 + 6
    assert decode(wrapped, request()) == decode(decoder, request())


# --------------------------------------------------------------------------------------------------------------- shape
def test_shape_of_a_tree_from_its_parents() -> None:
    """Ancestors, depths and paths of two trees, one of them two roots."""
    above = ancestors(torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, -1]]))
    assert above.long().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
    ]
    assert depths(above).tolist() == [[0, 1, 1, 2], [0, 0, 1, 0]]
    assert paths(above)[0, 3, :3].tolist() == [0, 2, 3]
    assert paths(above)[1, 2, :2].tolist() == [1, 2]
    with pytest.raises(InternalError, match="a parent must stand before its children"):
        ancestors(torch.tensor([[-1, 2, 0]]))
