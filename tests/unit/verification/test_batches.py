"""A rule in a batch: a row is what it is alone, whatever stands beside it; and what no uniform may let through."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import every_path
from specverify.choices.philox import Philox
from specverify.choices.scripted import Scripted
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.rules import RULES, Drafts

VOCAB_SIZE = 7
TREES = {Drafts.WITH_REPLACEMENT, Drafts.WITHOUT_REPLACEMENT, Drafts.TOP_K}
PARENTS = torch.tensor(
    [
        [-1, -1, 0, 0, 1, 1],
        [-1, -1, -1, 0, 1, 2],
        [-1, 0, 1, 2, 3, 4],
        [-1, 0, 0, 2, -1, 4],
        [-1, -1, 1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1],
    ]
)
SIZES = torch.tensor([6, 6, 6, 6, 3, 0])
LARGEST = 1 - 2.0**-53


def batch(drafts, copies=1, *, zeros=0.2):
    """Six trees (chains for a rule over chains), with laws that differ from node to node but not among siblings."""
    rows = random_table(VOCAB_SIZE, 3, seed=1, zeros=zeros).levels[3].exp()
    trees = PARENTS.repeat(copies, 1)
    sizes = SIZES.repeat(copies)
    target_probs = rows[torch.arange(len(trees) * 7) % len(rows)].view(-1, 7, VOCAB_SIZE)
    if drafts not in TREES:
        trees = torch.arange(6).expand_as(trees) - 1
    by_parent = rows[(torch.arange(len(trees))[:, None] * 11 + (trees + 1) * 5) % len(rows)]
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros_like(trees)
    for tree in range(len(trees)):
        for place in range(6):
            law = by_parent[tree, place].clone()
            if drafts in {Drafts.WITHOUT_REPLACEMENT, Drafts.TOP_K}:
                law[ids[tree, :place][trees[tree, :place] == trees[tree, place]]] = 0
            ids[tree, place] = torch.multinomial(law + 1e-9, 1, generator=generator)
    there = torch.arange(6) < sizes[:, None]
    told = torch.where(there[..., None], by_parent, 0)
    return Proposal(ids, sizes, told, trees if drafts in TREES else None), target_probs


def rows_of(proposal, rows):
    """Some rows, in some order, cut to what they hold."""
    most = int(proposal.num_draft_tokens[rows].max())
    parents = None if proposal.parents is None else proposal.parents[rows, :most]
    return Proposal(
        proposal.token_ids[rows, :most], proposal.num_draft_tokens[rows], proposal.draft_probs[rows, :most], parents
    ), most


def said(verification, row):
    """What one row accepts and emits."""
    number = int(verification.num_accepted_tokens[row])
    nodes = verification.accepted_nodes
    path = list(range(number)) if nodes is None else nodes[row, :number].tolist()
    return path, int(verification.next_token_ids[row])


@pytest.mark.parametrize("name", RULES)
def test_a_row_is_what_it_is_alone(name):
    """Its path and its token, with 24 neighbours of other shapes, alone, without padding, and in another order."""
    proposal, target_probs = batch(RULES[name].drafts, copies=4)
    choices = Philox.start(torch.full((24,), 3), torch.arange(24))
    together = RULES[name].rule(proposal, target_probs, choices)
    orders = [torch.tensor([row]) for row in range(24)] + [torch.arange(23, -1, -1)]
    for order in orders:
        some, most = rows_of(proposal, order)
        found = RULES[name].rule(some, target_probs[order, : most + 1], choices.select(order))
        for place, row in enumerate(order.tolist()):
            assert said(found, place) == said(together, row)
    lengths = {len(said(together, row)[0]) for row in range(24)}
    assert len(lengths) > 1, "nothing was accepted, or everything"


@pytest.mark.parametrize("name", [name for name, named in RULES.items() if named.drafts in TREES])
def test_accepted_nodes_are_a_path_of_drafted_nodes(name):
    """-1 after it; each node the child of the one before."""
    proposal, target_probs = batch(RULES[name].drafts, copies=8)
    found = RULES[name].rule(proposal, target_probs, Philox.start(torch.full((48,), 4), torch.arange(48)))
    assert found.accepted_nodes.shape == proposal.token_ids.shape
    for row in range(48):
        path, _ = said(found, row)
        assert found.accepted_nodes[row, len(path) :].eq(-1).all()
        assert all(node < int(proposal.num_draft_tokens[row]) for node in path)
        assert proposal.parents[row, path].tolist() == [-1, *path][:-1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
@pytest.mark.parametrize("name", [name for name, named in RULES.items() if named.lossless and name != "greedy"])
def test_no_uniform_lets_an_impossible_token_through(name, uniform):
    """Of a batch with many zeros, whatever was drafted: neither as an accepted draft nor after it."""
    proposal, target_probs = batch(RULES[name].drafts, copies=8, zeros=0.6)
    found = RULES[name].rule(proposal, target_probs, Scripted(dict.fromkeys(Stream, uniform)))
    for row in range(48):
        path, after = said(found, row)
        slots = [0, *(node + 1 for node in path)]
        tokens = [*proposal.token_ids[row, path].tolist(), after]
        assert all(float(target_probs[row, slot, token]) > 0 for slot, token in zip(slots, tokens, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_nothing_drafted_is_a_draw_of_the_targets(name):
    """No node in any row, and no place for one."""
    target_probs = random_table(VOCAB_SIZE, 1, seed=1, zeros=0.5).levels[1].exp()[:4, None]
    parents = torch.zeros(4, 0, dtype=torch.int64) if RULES[name].drafts in TREES else None
    nothing = Proposal(
        torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), target_probs[:, :0], parents
    )
    found = RULES[name].rule(nothing, target_probs, Philox.start(torch.arange(4), torch.arange(4)))
    assert found.num_accepted_tokens.tolist() == [0] * 4
    assert bool((target_probs[:, 0].gather(1, found.next_token_ids[:, None]) > 0).all())
    assert parents is None or found.accepted_nodes.shape == (4, 0)


@pytest.mark.parametrize("name", ["recursive-without-replacement", "traversal", "top-k-children"])
def test_a_sibling_that_cannot_be_is_refused(name):
    """A drafter that fills up with a repeated id changes nothing: the second one is never accepted."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0, 0]]), torch.tensor([2]), q.expand(1, 2, -1), torch.tensor([[-1, -1]]))
    first, second = (
        RULES[name].rule(proposal, p.expand(1, 3, -1), Scripted({Stream.ACCEPT: uniform, Stream.RESIDUAL: 0.0}))
        for uniform in (0.49, 0.51)
    )
    assert said(first, 0)[0] == [0]
    assert said(second, 0) == ([], 1)


@pytest.mark.parametrize(
    "name", [name for name, named in RULES.items() if named.lossless and name not in {"greedy", "match", "gumbel"}]
)
def test_bonus_and_residual_have_streams_of_their_own(name):
    """The token after an accepted path is drawn from `BONUS`, the one after a rejection from `RESIDUAL`."""
    even = torch.full((1, 3, 4), 0.25, dtype=torch.float64)
    parents = torch.tensor([[-1, 0]]) if RULES[name].drafts in TREES else None
    proposal = Proposal(torch.tensor([[1, 1]]), torch.tensor([2]), even[:, :2], parents)
    script = {Stream.ACCEPT: 0.0, Stream.BONUS: LARGEST, Stream.RESIDUAL: 0.0}
    assert said(RULES[name].rule(proposal, even, Scripted(script)), 0) == ([0, 1], 3)
    impossible = torch.tensor([0.3, 0.0, 0.3, 0.4], dtype=torch.float64).expand(1, 3, -1)
    script = {Stream.ACCEPT: 0.0, Stream.BONUS: 0.0, Stream.RESIDUAL: LARGEST}
    assert said(RULES[name].rule(proposal, impossible, Scripted(script)), 0) == ([], 3)


@pytest.mark.parametrize("name", ["match", "gumbel"])
def test_no_path_forks_after_the_last_token_that_counts(name):
    """One draft in a block for two: its place, and the place after it where it was right; nothing at the third."""
    even = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)

    def program(choices):
        paths = len(choices.records)
        proposal = Proposal(
            torch.ones(paths, 2, dtype=torch.int64),
            torch.ones(paths, dtype=torch.int64),
            even[:, :2].expand(paths, -1, -1),
        )
        return RULES[name].rule(proposal, even.expand(paths, -1, -1), choices).num_accepted_tokens

    found = torch.cat([outcomes for outcomes, _ in every_path(program)])
    assert found.bincount().tolist() == [2, 3]


def test_a_draft_of_reported_probability_0_is_refused_as_a_block():
    """It can't have been drawn, so no mass of the draft's pays for it."""
    p, q = torch.full((1, 2, 2), 0.5, dtype=torch.float64), torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    found = RULES["block"].rule(
        Proposal(torch.tensor([[1]]), torch.tensor([1]), q), p, Scripted({Stream.RESIDUAL: 0.0})
    )
    assert said(found, 0) == ([], 1)
