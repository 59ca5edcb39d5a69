"""Proposals: drawn from the law that is reported, after exactly the tokens that were said, and never more than fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.context import Context, Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import Drafting, DraftModel, NoDraft, PromptLookup, ScriptedDrafts
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, SamplingParams, count
from specverify.verification import Proposal

VOCAB_SIZE = 3
TARGET = random_table(VOCAB_SIZE, 9, seed=0)
DRAFT = random_table(VOCAB_SIZE, 9, seed=1)


def context(prompts: list[tuple[int, ...]], params: SamplingParams | None = None) -> Context:
    """Nothing said yet."""
    rows = [
        Row(
            DecodeRequest(id=str(seed), prompt_ids=ids, params=params or SamplingParams(max_new_tokens=7), seed=seed), 0
        )
        for seed, ids in enumerate(prompts)
    ]
    return Context.start(rows, torch.device("cpu"))


def say(state: Context, said: list[list[int]]) -> None:
    """Each row emits its ids."""
    longest = max(map(len, said))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in said])
    for _ in state.commit(padded, [(len(ids), None) for ids in said], [DecodeStep(0, 0, 1)] * len(said)):
        pass


def expected(state: Context, sizes: list[int]) -> Proposal:
    """The drafts by a literal computation: one prefix, one row of the table, one uniform at a time."""
    ids = torch.zeros(len(sizes), max(sizes), dtype=torch.int64)
    laws = torch.zeros(len(sizes), max(sizes), VOCAB_SIZE, dtype=torch.float64)
    choices = state.choices
    assert isinstance(choices, Philox)
    for row, size in enumerate(sizes):
        prefix = state.token_ids[row, : int(state.lengths[row])].tolist()
        for place in range(size):
            laws[row, place] = DRAFT.row(prefix).softmax(-1)
            uniform = float(choices.uniform(Stream.DRAFT, torch.tensor([place]))[row, 0])
            token = int((laws[row, place].cumsum(-1) <= uniform).sum())
            ids[row, place] = token
            prefix.append(token)
    return Proposal(ids, torch.tensor(sizes), laws)


def assert_proposes(drafting: Drafting, state: Context, sizes: list[int], wanted: list[int] | None = None) -> Proposal:
    """The drafter proposes what the literal computation does."""
    actual, literal = drafting.propose(state, torch.tensor(wanted or sizes)), expected(state, sizes)
    assert actual.num_draft_tokens.tolist() == sizes
    assert torch.equal(torch.where(actual.drafted, actual.token_ids, 0), literal.token_ids)
    torch.testing.assert_close(actual.draft_probs, literal.draft_probs, rtol=0, atol=1e-14)
    return actual


def test_drafts_follow_the_draft_models_law_in_a_ragged_batch() -> None:
    """Ids and reported laws are those of a literal computation, for prompts and numbers of drafts that differ."""
    state = context([(0, 1, 2), (1,), (2, 2)])
    assert_proposes(DraftModel(DRAFT, VOCAB_SIZE)(state), state, [3, 1, 2])


def test_the_draft_catches_up_after_full_acceptance_and_after_rejection() -> None:
    """The last accepted draft was never fed to the draft model; a rejected one was, and must be forgotten."""
    state = context([(0, 1), (1,), (2, 2)])
    drafting = DraftModel(DRAFT, VOCAB_SIZE)(state)
    ids = assert_proposes(drafting, state, [2, 2, 2]).token_ids.tolist()
    other = (ids[1][0] + 1) % VOCAB_SIZE
    say(state, [[*ids[0], 1], [other], [ids[2][0], 2]])  # all accepted, none, one
    assert_proposes(drafting, state, [2, 2, 2])
    say(state, [[0], [1, 2, 0], [1]])
    assert_proposes(drafting, state, [1, 1, 1])


def test_a_step_without_drafts_leaves_nothing_stale() -> None:
    """Empty drafts for some rows, then for all, then drafts again."""
    state = context([(0, 1), (1,)])
    drafting = DraftModel(DRAFT, VOCAB_SIZE)(state)
    assert_proposes(drafting, state, [0, 2])
    say(state, [[2], [0]])
    nothing = drafting.propose(state, torch.tensor([0, 0]))
    assert nothing.token_ids.shape == (2, 0)
    assert nothing.draft_probs.shape == (2, 0, VOCAB_SIZE)
    say(state, [[1], [2]])
    assert_proposes(drafting, state, [2, 1])


def test_rows_that_leave_are_forgotten() -> None:
    """The others go on with their own prefixes."""
    state = context([(0, 1), (1,), (2, 2)])
    drafting = DraftModel(DRAFT, VOCAB_SIZE)(state)
    assert_proposes(drafting, state, [2, 2, 2])
    say(state, [[2], [0], [1]])
    keep = torch.tensor([0, 2])
    state.select(keep)
    drafting.select(keep)
    assert_proposes(drafting, state, [2, 1])


def test_drafts_stop_at_the_drafts_own_positions() -> None:
    """A draft with fewer positions than the target drafts less, then nothing, and the decode goes on."""
    short = replace(DRAFT, levels=DRAFT.levels[:5])  # four positions
    state = context([(0, 1, 2), (1, 2), (0,) * 5])
    assert short.max_length == 4
    assert_proposes(DraftModel(short, VOCAB_SIZE)(state), state, [2, 3, 0], wanted=[3, 3, 3])
    decoder = Decoder(target=TARGET, drafter=DraftModel(short, VOCAB_SIZE), num_speculative_tokens=3)
    [trace] = speculative(
        decoder, [Row(DecodeRequest(id="r", prompt_ids=(0, 1), params=SamplingParams(max_new_tokens=7)), 0)]
    )
    assert len(trace.token_ids) == 7
    assert trace.steps[-1].num_draft_tokens == 0


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    """At every length: an acceptance below 1 would mean that the draft's state is off somewhere."""
    decoder = Decoder(target=TARGET, drafter=DraftModel(TARGET, VOCAB_SIZE))
    params = SamplingParams(max_new_tokens=8)
    requests = [DecodeRequest(id=str(seed), prompt_ids=(seed % 3,), params=params, seed=seed) for seed in range(64)]
    counters = count(speculative(decoder, [Row(request, 0) for request in requests]))
    assert counters.acceptance_rate == 1


def test_ids_that_the_target_does_not_have_are_never_drafted() -> None:
    """Unlike output layers are cut or padded to the target's ids."""
    wide, narrow = random_table(5, 6, seed=4), random_table(2, 6, seed=5)
    for model in (wide, narrow):
        state = context([(0, 1), (1,)] * 20)
        proposal = DraftModel(model, VOCAB_SIZE)(state).propose(state, torch.full((40,), 2))
        assert proposal.draft_probs.shape[-1] == VOCAB_SIZE
        assert int(proposal.token_ids.max()) < min(VOCAB_SIZE, model.vocab_size)
        assert proposal.draft_probs.sum(-1).tolist() == [pytest.approx([1, 1])] * 40


def looked_up(tokens: list[int], *, most: int = 3, max_ngram: int = 3) -> list[int]:
    """What prompt lookup drafts after `tokens`."""
    state = context([tuple(tokens)])
    proposal = PromptLookup(10, max_ngram=max_ngram)(state).propose(state, torch.tensor([most]))
    assert torch.equal(proposal.draft_probs.argmax(-1), proposal.token_ids)
    return proposal.token_ids[0].tolist()


def test_prompt_lookup_copies_what_followed_the_longest_match() -> None:
    """The longest tail that occurred before, at its latest place; nothing where nothing occurred."""
    assert looked_up([1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2]
    assert looked_up([5, 1, 6, 1, 7, 1]) == [7, 1]
    assert looked_up([5, 2, 8, 9, 2, 7, 5, 2]) == [8, 9, 2]
    assert looked_up([5, 2, 8, 9, 2, 7, 5, 2], max_ngram=1) == [7, 5, 2]
    assert looked_up([1, 2, 3]) == []
    assert looked_up([1]) == []
    assert looked_up([1, 2, 3, 4, 1, 2, 3], most=1) == [4]


def test_scripted_drafts_say_what_the_script_says() -> None:
    """By tokens so far and step, cut to what fits, as point masses."""
    state = context([(0, 1), (2,)])
    script = ScriptedDrafts(lambda tokens, step: [tokens[-1], step + 1, 0][: 2 * len(tokens) - 1], VOCAB_SIZE)
    proposal = script(state).propose(state, torch.tensor([2, 3]))
    assert proposal.num_draft_tokens.tolist() == [2, 1]
    assert proposal.token_ids.tolist() == [[1, 1], [2, 0]]
    assert proposal.draft_probs.sum(-1).tolist() == [[1, 1], [1, 0]]


def test_no_draft_is_empty() -> None:
    """Every step is then a step of the target alone."""
    state = context([(0, 1), (2,)])
    assert NoDraft(VOCAB_SIZE)(state).propose(state, torch.tensor([3, 3])).token_ids.shape == (2, 0)


def test_equal_prompts_are_prefilled_once() -> None:
    """Samples of one request, and requests that share a prompt, share its state until they part."""
    opened: list[int] = []

    class Counting(TableModel):
        def open(self, prompts):
            opened.append(len(prompts))
            return super().open(prompts)

    state = context([(0, 1), (2,), (0, 1)])
    assert_proposes(DraftModel(Counting(DRAFT.levels), VOCAB_SIZE)(state), state, [2, 2, 2])
    assert opened == [2]


def test_a_trace_of_lookup_is_still_the_targets_text() -> None:
    """Deterministic drafts are point masses; at temperature 0 the text is the greedy one whatever is drafted."""
    params = SamplingParams(temperature=0, max_new_tokens=7)
    row = Row(DecodeRequest(id="r", prompt_ids=(0, 1), params=params), 0)
    texts: set[tuple[int, ...]] = set()
    for drafter in (PromptLookup(VOCAB_SIZE), NoDraft(VOCAB_SIZE), DraftModel(DRAFT, VOCAB_SIZE)):
        traces: list[DecodeTrace] = list(speculative(Decoder(target=TARGET, drafter=drafter), [row]))
        texts.add(traces[0].token_ids)
    assert len(texts) == 1
