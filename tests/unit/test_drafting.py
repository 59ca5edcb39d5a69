"""Proposals: drawn from the law that is reported, after exactly the tokens that were said, and never more than fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.context import Context, Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import (
    TREES,
    Drafting,
    DraftModel,
    DraftTree,
    NoDraft,
    PromptLookup,
    ScriptedDrafts,
    branching_of,
    drafter_for,
)
from specverify.errors import PlanError
from specverify.law import autoregressive_law, decoded_law, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, SamplingParams, count
from specverify.verification import Proposal
from specverify.verification.rules import Drafts
from tests.unit.trees import rule_for

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


# ------------------------------------------------------------------------------------------------- ids without embedding
@dataclass(frozen=True)
class Unreading(TableModel):
    """Its output layer has more rows than its input layer, as a padded head has."""

    num_embeddings: int = VOCAB_SIZE - 1

    def open(self, prompts):
        session = super().open(prompts)
        append = session.append

        def reading(token_ids, num_tokens, *parents):
            read = torch.arange(token_ids.shape[1]) < num_tokens[:, None]
            assert int(torch.where(read, token_ids, 0).max()) < self.num_embeddings, (
                "an id without an embedding was fed"
            )
            return append(token_ids, num_tokens, *parents)

        session.append = reading
        return session


UNREADING = Unreading(DRAFT.levels)


def test_a_chain_ends_after_an_id_that_the_draft_cant_read() -> None:
    """The id itself is proposed with its law; its neighbours draft on, and the row is not fed to the draft again."""
    state = context([(0, 1), (1,)] * 20)
    drafting = DraftModel(UNREADING, VOCAB_SIZE)(state)
    proposal = drafting.propose(state, torch.full((40,), 3))
    whole = expected(state, [3] * 40)
    stops = [next((place + 1 for place, token in enumerate(ids) if token == 2), 3) for ids in whole.token_ids.tolist()]
    assert len(set(stops)) == 3
    literal = expected(state, stops)
    assert proposal.num_draft_tokens.tolist() == stops
    assert torch.equal(torch.where(proposal.drafted, proposal.token_ids, 0), literal.token_ids)
    torch.testing.assert_close(proposal.draft_probs, literal.draft_probs, rtol=0, atol=1e-14)
    say(state, [[2] if row % 2 else [0] for row in range(40)])
    again = drafting.propose(state, torch.full((40,), 3))
    assert again.num_draft_tokens[1::2].tolist() == [0] * 20
    assert int(again.num_draft_tokens[::2].min()) > 0


@pytest.mark.parametrize("drafter", [DraftModel(UNREADING, VOCAB_SIZE), DraftTree(UNREADING, VOCAB_SIZE, (2, 1))])
def test_a_draft_that_cant_read_every_id_is_exact_all_the_same(drafter: DraftModel | DraftTree) -> None:
    """Stopping after a token is exact, and the decode goes on without drafts."""
    target = random_table(VOCAB_SIZE, 4, seed=0)
    decoder = Decoder(target=target, drafter=drafter, num_speculative_tokens=2)
    if isinstance(drafter, DraftTree):
        decoder = replace(decoder, rule=rule_for(drafter.drafts))
    actual = decoded_law(decoder, max_new_tokens=3 if isinstance(drafter, DraftModel) else 2)
    law = autoregressive_law(target, max_new_tokens=len(next(iter(actual))))
    assert total_variation(actual, law) < 1e-12


# ----------------------------------------------------------------------------------------------------------------- trees
def literal_tree(
    state: Context, row: int, depth: int, branching: tuple[int, ...], drafts: Drafts
) -> list[tuple[int, int, list[float]]]:
    """(parent, id, law) of each node of a row, one prefix, one draw at a time; places count the complete tree."""
    choices = state.choices
    assert isinstance(choices, Philox)
    said = state.token_ids[row, : int(state.lengths[row])].tolist()
    nodes: list[tuple[int, int, list[float]]] = []
    level: list[tuple[int, list[int]] | None] = [(-1, said)]
    before = 0
    for number in branching[:depth]:
        below: list[tuple[int, list[int]] | None] = []
        for index, parent in enumerate(level):
            law = DRAFT.row(parent[1]).softmax(-1).tolist() if parent else []
            left = dict(enumerate(law))
            for child in range(number):
                place = before + index * number + child
                if parent is None or not left:
                    below.append(None)
                    continue
                uniform = float(choices.uniform(Stream.DRAFT, torch.tensor([place]))[row, 0])
                if drafts is Drafts.TOP_K:
                    token = max(left, key=lambda one: left[one])
                else:
                    edges = torch.tensor([left.get(one, 0.0) for one in range(VOCAB_SIZE)], dtype=torch.float64).cumsum(
                        0
                    )
                    token = int((edges <= uniform * edges[-1]).sum())
                if drafts is not Drafts.WITH_REPLACEMENT:
                    del left[token]
                own = [float(one == token) for one in range(VOCAB_SIZE)] if drafts is Drafts.TOP_K else law
                nodes.append((parent[0], token, own))
                below.append((len(nodes) - 1, [*parent[1], token]))
        before += len(level) * number
        level = below
    return nodes


@pytest.mark.parametrize("drafts", TREES, ids=lambda way: way.name)
@pytest.mark.parametrize("branching", [(2, 2, 1), (3,), (4, 1), (1, 1, 1)], ids=str)
def test_trees_follow_the_draft_models_law_in_a_ragged_batch(drafts: Drafts, branching: tuple[int, ...]) -> None:
    """Ids, parents and laws are those of a literal computation, step after step; room bounds the depth of each row.

    Four children of three ids are three without replacement, and four with.
    """
    state = replace(context([(0, 1, 2), (1,), (2, 2)]))
    state.choices = replace(state.choices, window=24)
    drafting = DraftTree(DRAFT, VOCAB_SIZE, branching, drafts)(state)
    for step, room in enumerate(([3, 1, 2], [0, 0, 0], [2, 3, 0])):
        proposal = drafting.propose(state, torch.tensor(room))
        for row, depth in enumerate(room):
            nodes = literal_tree(state, row, depth, branching, drafts)
            count_ = int(proposal.num_draft_tokens[row])
            actual = zip(proposal.parents[row].tolist(), proposal.token_ids[row].tolist(), strict=True)
            assert list(actual)[:count_] == [node[:2] for node in nodes]
            laws = torch.tensor([node[2] for node in nodes], dtype=torch.float64).view(-1, VOCAB_SIZE)
            torch.testing.assert_close(proposal.draft_probs[row, :count_], laws, rtol=0, atol=1e-14)
            assert not proposal.draft_probs[row, count_:].any()
        say(state, [[step, 1], [2], [0]] if step else [[2], [0, 1], [1]])


def test_a_used_up_support_gives_fewer_children() -> None:
    """Two possible ids: two children without replacement and of the most probable, three with replacement."""
    narrow = random_table(2, 6, seed=5)
    state = context([(0, 1), (1,)])
    for drafts, children in ((Drafts.WITHOUT_REPLACEMENT, 2), (Drafts.TOP_K, 2), (Drafts.WITH_REPLACEMENT, 3)):
        proposal = DraftTree(narrow, VOCAB_SIZE, (3,), drafts)(state).propose(state, torch.tensor([1, 1]))
        assert proposal.num_draft_tokens.tolist() == [children] * 2
        if children == 2:
            assert proposal.token_ids.sort(1).values.tolist() == [[0, 1], [0, 1]]


def test_equally_probable_children_are_taken_in_the_order_of_their_ids() -> None:
    """All ids tie."""
    flat = TableModel(tuple(torch.zeros_like(rows).log_softmax(-1) for rows in DRAFT.levels))
    state = context([(0, 1)])
    proposal = DraftTree(flat, VOCAB_SIZE, (3,), Drafts.TOP_K)(state).propose(state, torch.tensor([1]))
    assert proposal.token_ids.tolist() == [[0, 1, 2]]


def test_rows_that_leave_a_batch_of_trees_are_forgotten() -> None:
    """The others go on with their own prefixes, and draft what they draft alone."""
    state = context([(0, 1), (1,), (2, 2)])
    drafting = DraftTree(DRAFT, VOCAB_SIZE, (2, 1))(state)
    drafting.propose(state, torch.tensor([2, 2, 2]))
    say(state, [[2], [0], [1]])
    state.select(torch.tensor([0, 2]))
    drafting.select(torch.tensor([0, 2]))
    proposal = drafting.propose(state, torch.tensor([2, 2]))
    for row in range(2):
        nodes = literal_tree(state, row, 2, (2, 1), Drafts.WITH_REPLACEMENT)
        assert proposal.token_ids[row].tolist() == [node[1] for node in nodes]


def test_shapes_that_are_no_tree_are_refused() -> None:
    """In one sentence; and a shape is cut to the depth that is asked, or goes on with single children."""
    for shape, drafts in (((), Drafts.TOP_K), ((2, 0), Drafts.TOP_K), ((2,), Drafts.CHAIN), ((2,), Drafts.COUPLED)):
        with pytest.raises(PlanError, match="needs at least one child a level"):
            DraftTree(DRAFT, VOCAB_SIZE, shape, drafts)
    assert [branching_of(depth) for depth in (1, 3, 5)] == [(3,), (3, 2, 1), (3, 2, 1, 1, 1)]
    assert DraftTree(DRAFT, VOCAB_SIZE, (3, 2, 1)).num_nodes == 3 + 6 + 6


def test_each_way_of_drafting_has_its_drafter() -> None:
    """Rules name the way; the drafter follows from it."""
    for drafts in Drafts:
        drafter = drafter_for(drafts, DRAFT, VOCAB_SIZE, branching=[2, 1])
        if drafts in TREES:
            assert drafter == DraftTree(DRAFT, VOCAB_SIZE, (2, 1), drafts)
        else:
            assert drafter == DraftModel(DRAFT, VOCAB_SIZE, coupled=drafts is Drafts.COUPLED)
