"""Every lossless rule: the exact law of a step, extended by the target's own conditionals, is the target's law."""

from __future__ import annotations

import pytest
import torch

from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.faults.tree import TREE_FAULTS
from specverify.models.table import random_table
from specverify.verification.rules import RULES, Drafts
from tests.unit.verification.proofs import chain_of, laws_after_step, pairs, steps, tree_of

TOLERANCE = 1e-12
SHAPES = {
    "chains": [chain_of(3), chain_of(1), chain_of(2), ()],
    "complete": [tree_of(2, 2), tree_of(3, 1), tree_of(2, 1, 1)],
    "ragged": [tree_of(1, 2), tree_of(3), (-1, 0, 0, 2, -1), (-1, -1, 0, 1), (-1, 0, -1, 0, 1), ()],
}
"""The trees that the rows of one batch draft; some of the ragged ones don't go level by level."""
OVER_CHAINS = [
    name for name, named in RULES.items() if named.lossless and named.drafts in (Drafts.CHAIN, Drafts.COUPLED)
]
OVER_TREES = [name for name, named in RULES.items() if named.lossless and name not in OVER_CHAINS]
PAIRS = {pair.name: pair for pair in pairs()}


def distance(name, pair, shapes, *, as_chain=False):
    """The greatest TV distance over the shapes."""
    named = RULES[name]
    found = steps(named.rule, pair, shapes, named.drafts, as_chain=as_chain)
    laws, target = laws_after_step(found, pair, len(shapes))
    assert float((laws.sum(-1) - 1).abs().max()) < 1e-12
    return float((laws - target).abs().sum(-1).max()) / 2


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", [name for name in OVER_CHAINS if name != "greedy"])
def test_rules_over_chains_emit_the_targets_law(name, pair):
    """Chains of 3, 2, 1 and 0 drafts in one batch."""
    assert distance(name, PAIRS[pair], SHAPES["chains"], as_chain=True) <= TOLERANCE


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", OVER_TREES)
def test_rules_over_trees_take_chains(name, pair):
    """With parents that say so, and with none."""
    for as_chain in (False, True):
        assert distance(name, PAIRS[pair], SHAPES["chains"], as_chain=as_chain) <= TOLERANCE


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "chains"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", OVER_TREES)
def test_rules_over_trees_emit_the_targets_law(name, pair, shape):
    """Every tree of the batch by itself."""
    assert distance(name, PAIRS[pair], SHAPES[shape]) <= TOLERANCE


def test_greedy_emits_the_most_probable_tokens():
    """Whatever was drafted: each emitted token is the argmax of its own row."""
    pair = PAIRS["random"]
    best = pair.target.argmax(-1)
    for step in steps(RULES["greedy"].rule, pair, SHAPES["chains"], Drafts.CHAIN, as_chain=True):
        prefix = step.emitted
        while bool((prefix > 0).any()):
            above, token = (prefix - 1).div(3, rounding_mode="floor").clamp(min=0), (prefix - 1) % 3
            assert bool(((prefix == 0) | (token == best[above])).all())
            prefix = torch.where(prefix > 0, above, 0)


def test_the_pairs_depend_on_the_context():
    """A residual from another row would go unseen on laws that do not."""
    for pair in PAIRS.values():
        assert len(pair.target.unique(dim=0)) > 3


@pytest.mark.parametrize("fault", TREE_FAULTS, ids=lambda fault: fault.name)
def test_the_law_fails_on_planted_wrong_rules(fault):
    """On one tree of two by two, or one chain, of one of the first two pairs."""
    table = random_table(3, 1, seed=0)
    wrong = fault.apply(Decoder(target=table, drafter=DraftModel(table, 3)))
    chain = wrong.drafts is Drafts.CHAIN
    shapes = [chain_of(3)] if chain else [tree_of(2, 2)]
    worst = 0.0
    for pair in (PAIRS["random"], PAIRS["other"]):
        laws, target = laws_after_step(steps(wrong.rule, pair, shapes, wrong.drafts, as_chain=chain), pair, 1)
        worst = max(worst, float((laws - target).abs().sum()) / 2)
    assert worst > 1e-3
