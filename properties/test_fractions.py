"""Exactly zero: rules proved in fractions at V = 4, g = 3, near zero in floats, and wrong rules seen at that scope.

The table of scopes in docs/scopes.md comes from `specverify faults --scopes`.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from specverify.drafting import TREES
from specverify.errors import InternalError
from specverify.scopes import (
    SCOPES,
    Scope,
    decoder_over,
    distances,
    edge_instances,
    exact_distances,
    kills,
    mutants,
    random_instances,
)
from specverify.verification.rules import RULES, Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specverify.choices import Choices
    from specverify.decoding import Decoder
    from specverify.qualify.instances import Instance
    from specverify.verification import Proposal, Verification

WHOLE = SCOPES[-1]
CHAINS = ("chain", "match", "block")
TREE_RULES = ("recursive", "recursive-without-replacement", "top-k-children", "traversal")
SIBLINGS = (2, 3)


def decoder(name: str, instances: Sequence[Instance], branching: Sequence[int] = (2,)) -> Decoder:
    """A rule over instances of one scope."""
    return decoder_over(instances, RULES[name], branching=branching)


def in_float32(subject: Decoder) -> Decoder:
    """The rule is given both laws in float32."""

    def rule(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
        told = replace(proposal, draft_probs=proposal.draft_probs.float())
        return subject.rule(told, target_probs.float(), choices)

    return replace(subject, rule=rule)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_rule_is_proved_in_fractions(name: str) -> None:
    """Twelve random instances and the hard cases: a distance of exactly 0."""
    for instances in (random_instances(WHOLE), edge_instances()):
        assert set(exact_distances(decoder(name, instances), instances)) == {Fraction(0)}


@pytest.mark.parametrize("num_siblings", SIBLINGS)
@pytest.mark.parametrize("name", TREE_RULES)
def test_a_tree_rule_is_proved_in_fractions(name: str, num_siblings: int) -> None:
    """Two and three siblings of four ids."""
    scope = Scope(4, 1)
    for instances in (random_instances(scope), edge_instances(scope)):
        assert set(exact_distances(decoder(name, instances, (num_siblings,)), instances)) == {Fraction(0)}


@pytest.mark.parametrize("name", ["recursive-without-replacement", "traversal"])
def test_a_tree_of_two_levels_is_proved_in_fractions(name: str) -> None:
    """Two siblings, each with a child."""
    instances = random_instances(Scope(3, 2), 4, denominator=8)
    assert set(exact_distances(decoder(name, instances, (2, 1)), instances)) == {Fraction(0)}


@pytest.mark.parametrize(("eos", "length"), [((1,), 0), ((0, 2), 0), ((), 1), ((), 2), ((1,), 2)])
@pytest.mark.parametrize("name", CHAINS)
def test_an_end_inside_the_block_is_proved_in_fractions(name: str, eos: tuple[int, ...], length: int) -> None:
    """An EOS among the drafts, and a limit that cuts the block."""
    instances = random_instances(WHOLE, 4)
    assert set(exact_distances(decoder(name, instances), instances, eos=eos, length=length)) == {Fraction(0)}


@pytest.mark.parametrize("name", [*CHAINS, *TREE_RULES, "k-sequence"])
def test_a_rule_is_right_in_floats(name: str) -> None:
    """1e-12 in float64, 1e-6 in float32, with a probability of 1e-30 among the rest."""
    scope = Scope(4, 1) if RULES[name].drafts in TREES else WHOLE
    tiny, one = Fraction(1, 10**30), edge_instances(scope)[-1]
    almost = replace(
        one,
        name="almost impossible",
        draft={at: (tiny, row[1] + row[0] - tiny, *row[2:]) for at, row in one.draft.items()},
    )
    instances = (*random_instances(scope, 4), *edge_instances(scope), almost)
    assert max(distances(decoder(name, instances), instances)) < 1e-12
    assert max(distances(in_float32(decoder(name, instances)), instances)) < 1e-6


def test_what_is_no_fraction_is_refused() -> None:
    """The threshold of k-sequence is a root, so its law can't be had in fractions."""
    instances = random_instances(Scope(4, 1), 2)
    with pytest.raises(InternalError, match="no fraction"):
        exact_distances(decoder("k-sequence", instances), instances)


def test_a_wrong_rule_has_an_exact_distance() -> None:
    """By hand: p = (3/4, 1/4), q = (1/4, 3/4), the residual from p: 1/2 is rejected, of which 1/4 should not be id 1."""
    from specverify.faults import find_fault
    from specverify.qualify.instances import Instance

    p, q = (Fraction(3, 4), Fraction(1, 4)), (Fraction(1, 4), Fraction(3, 4))
    instance = Instance("by hand", 1, dict.fromkeys([(), (0,), (1,)], p), {(): q})
    subject = find_fault("residual-from-target").apply(decoder("chain", (instance,)))
    assert exact_distances(subject, (instance,), length=1) == [Fraction(0)]  # with one token nothing is drafted
    assert exact_distances(subject, (instance,)) == [Fraction(1, 8)]


IN_FULL = {"accept-or-equal"}
"""Seen at u = 0 alone, which has no probability; `exactness` asks there."""


@pytest.mark.parametrize("name", sorted(set(mutants()) - IN_FULL))
def test_a_wrong_rule_is_seen_at_the_scope(name: str) -> None:
    """In one of three instances at least; the table says in how many of twelve."""
    assert kills(mutants()[name], RULES["chain"], WHOLE, number=3) > 0


def test_every_rule_is_proved_somewhere() -> None:
    """But for the greedy one, which has no law, the coupled one, whose noise is no fork, and the root of k-sequence."""
    lossless = {name for name, named in RULES.items() if named.lossless}
    assert lossless - {*CHAINS, *TREE_RULES} == {"greedy", "gumbel", "k-sequence"}
    assert RULES["gumbel"].drafts is Drafts.COUPLED
