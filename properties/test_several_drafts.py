"""several drafts: over trees and blocks, every rule emits the target's law, and none accepts more than transport allows.

Faults that it must catch: those of `specverify.faults.tree`.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations, permutations, product
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.oracle import pairs
from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.decoding import Decoder
from specverify.drafting import TREES, DraftModel, drafter_for
from specverify.faults.tree import TREE_FAULTS
from specverify.law import autoregressive_law, decoded_law, step_laws, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification import Proposal, Rule, Verification
from specverify.verification.block import block_verification
from specverify.verification.chain import chain_rejection
from specverify.verification.k_sequence import division_factor, k_sequence
from specverify.verification.rules import RULES, Drafts
from specverify.verification.tree import recursive_rejection, traversal

if TYPE_CHECKING:
    from specverify.faults import Fault

TOLERANCE = 1e-12
SEEDS = st.integers(0, 2**20)
TREE_RULES = [name for name, named in RULES.items() if named.drafts in TREES]


def decoder(name: str, target: TableModel, draft: TableModel, branching: tuple[int, ...]) -> Decoder:
    """The reference decoder over one pair of tables."""
    named = RULES[name]
    drafter = drafter_for(named.drafts, draft, target.vocab_size, branching=branching)
    depth = len(branching)
    return Decoder(target=target, drafter=drafter, rule=named.rule, drafts=named.drafts, num_speculative_tokens=depth)


@pytest.mark.parametrize("branching", [(3,), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("name", TREE_RULES)
def test_trees_of_any_shape_emit_the_targets_law(name: str, branching: tuple[int, ...]) -> None:
    """The first two tokens, exactly, on tables that depend on the whole prefix."""
    for _, target, draft in (pairs()[0], pairs()[8]):
        actual = decoded_law(decoder(name, target, draft, branching), max_new_tokens=2)
        assert total_variation(actual, autoregressive_law(target, max_new_tokens=2)) <= TOLERANCE


@pytest.mark.parametrize("fault", TREE_FAULTS, ids=lambda fault: fault.name)
def test_the_property_fails_on_its_faults(fault: Fault) -> None:
    """A property that can't fail proves nothing; some of these faults are blind on one pair in two, so there are four."""
    found = []
    for seed in range(4):
        target, draft = (random_table(3, 4, seed=2 * seed + which) for which in (0, 1))
        chain = Decoder(target=target, drafter=DraftModel(draft, 3), num_speculative_tokens=2)
        law = decoded_law(fault.apply(chain), max_new_tokens=3)
        found.append(total_variation(law, autoregressive_law(target, max_new_tokens=3)))
    assert max(found) > 1e-4


# -------------------------------------------------------------------------------------------------- how much is accepted


def rows(seed: int, vocab_size: int = 4, zeros: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """A target's and a draft's law."""
    laws = random_table(vocab_size, 1, seed=seed, zeros=zeros).levels[1].exp()
    return laws[0], laws[1]


def siblings(q: torch.Tensor, k: int, drafts: Drafts) -> dict[tuple[int, ...], float]:
    """Every tuple of siblings that can be drafted, with its probability, written out; shorter than k where q has no more."""
    ids = range(len(q))
    if drafts is Drafts.TOP_K:
        return {tuple(sorted(ids, key=lambda x: (-float(q[x]), x))[:k]): 1.0}
    possible = q.nonzero().flatten().tolist()
    without = drafts is Drafts.WITHOUT_REPLACEMENT
    found = {}
    for drawn in permutations(possible, min(k, len(possible))) if without else product(possible, repeat=k):
        weight, left = 1.0, 1.0
        for x in drawn:
            weight *= float(q[x]) / left
            left -= float(q[x]) if without else 0.0
        found[drawn] = weight
    return found


def accepted_share(rule: Rule, p: torch.Tensor, q: torch.Tensor, k: int, drafts: Drafts) -> float:
    """Probability that one of the siblings is accepted, over every path of the rule."""
    drawn = siblings(q, k, drafts)
    tuples, weights = torch.tensor(list(drawn)), torch.tensor(list(drawn.values()), dtype=torch.float64)
    k = tuples.shape[1]

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        which = choices.draw(weights.expand(paths, 1, -1), stream=Stream.DRAFT, at=torch.tensor([0]))[:, 0]
        ids = tuples[which]
        laws = torch.nn.functional.one_hot(ids, len(q)).double() if drafts is Drafts.TOP_K else q.expand(paths, k, -1)
        proposal = Proposal(ids, torch.full((paths,), k), laws, torch.full((paths, k), -1))
        return rule(proposal, p.expand(paths, k + 1, -1), choices).num_accepted_tokens

    return sum(float((outcome * weight).sum()) for outcome, weight in every_path(program))


def transport_bound(p: torch.Tensor, drawn: dict[tuple[int, ...], float]) -> float:
    """a* = 1 + min over sets H of P(H) - Q(H), Q(H) the probability that all siblings lie in H [SpecTr2023, Thm. 3].

    No rule that emits the target's law accepts more.
    """
    ids = range(len(p))
    subsets = [set(chosen) for size in range(len(p) + 1) for chosen in combinations(ids, size)]
    inside = [sum(weight for each, weight in drawn.items() if set(each) <= chosen) for chosen in subsets]
    return 1 + min(float(p[list(chosen)].sum()) - weight for chosen, weight in zip(subsets, inside, strict=True))


def excess(rule: Rule, p: torch.Tensor, q: torch.Tensor, k: int, drafts: Drafts) -> float:
    """Acceptance above the bound."""
    return accepted_share(rule, p, q, k, drafts) - transport_bound(p, siblings(q, k, drafts))


@pytest.mark.parametrize("name", TREE_RULES)
@given(seed=SEEDS, k=st.integers(1, 3))
def test_no_rule_accepts_more_than_transport_allows(name: str, seed: int, k: int) -> None:
    """And with one draft every rule reaches it: Σ min(p, q), of a chosen draft p(x)."""
    over = excess(RULES[name].rule, *rows(seed), k, RULES[name].drafts)
    assert over <= TOLERANCE
    if k == 1:
        assert over >= -TOLERANCE


@given(seed=SEEDS, k=st.integers(1, 3))
def test_chosen_children_reach_what_transport_allows(seed: int, k: int) -> None:
    """The target's own mass of the ids that the draft finds most probable."""
    p, q = rows(seed)
    [chosen] = siblings(q, k, Drafts.TOP_K)
    share = accepted_share(RULES["top-k-children"].rule, p, q, k, Drafts.TOP_K)
    assert share == pytest.approx(float(p[list(chosen)].sum()), abs=TOLERANCE)
    assert share == pytest.approx(transport_bound(p, {chosen: 1.0}), abs=TOLERANCE)


@given(seed=SEEDS, k=st.integers(1, 3))
def test_a_k_sequence_accepts_what_its_equation_says(seed: int, k: int) -> None:
    """That is r β, which is 1 - (1 - β)^k."""
    p, q = rows(seed)
    r = float(division_factor(p[None], q[None], torch.tensor([k])))
    beta = float(torch.minimum(q, p / r).sum())
    share = accepted_share(k_sequence, p, q, k, Drafts.WITH_REPLACEMENT)
    assert share == pytest.approx(r * beta, abs=TOLERANCE)


def everything(proposal: Proposal, target_probs: torch.Tensor, choices: Enumerate) -> Verification:
    """Whatever is drafted is accepted."""
    return recursive_rejection(proposal, torch.ones_like(target_probs), choices)


def undivided(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """1, whatever the number of siblings."""
    del q, k
    return torch.ones_like(p[:, 0])


TOO_MUCH = {
    "everything-accepted": (everything, Drafts.WITH_REPLACEMENT),
    "siblings-raw-draft-law": (recursive_rejection, Drafts.WITHOUT_REPLACEMENT),
    "k-sequence-undivided": (
        partial(k_sequence, divide=undivided),
        Drafts.WITH_REPLACEMENT,
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_the_bound_fails_on_rules_that_accept_too_much(name: str) -> None:
    """Some laws show it."""
    rule, drafts = TOO_MUCH[name]
    assert max(excess(rule, *rows(seed), 2, drafts) for seed in range(8)) > 1e-3


@given(seed=SEEDS, k=st.integers(1, 4))
def test_the_shared_threshold_solves_its_equation(seed: int, k: int) -> None:
    """1 - (1 - β)^k = r β at r, from the side on which the residual is a law."""
    p, q = (law[None] for law in rows(seed))
    r = float(division_factor(p, q, torch.tensor([k])))
    beta = float(torch.minimum(q, p / r).sum())
    assert 1 <= r <= k
    assert r * beta >= 1 - (1 - beta) ** k - 1e-12
    assert r * beta == pytest.approx(1 - (1 - beta) ** k, abs=1e-9)


# ---------------------------------------------------------------------------------------------------------------- blocks


def tokens_in_a_step(rule: Rule, seed: int, num_speculative_tokens: int) -> float:
    """Mean tokens that the first step emits, exactly."""
    target, draft = (random_table(3, 5, seed=2 * seed + which) for which in (0, 1))
    chain = Decoder(
        target=target, drafter=DraftModel(draft, 3), rule=rule, num_speculative_tokens=num_speculative_tokens
    )
    request = DecodeRequest(id="b", prompt_ids=(0,), params=SamplingParams(max_new_tokens=num_speculative_tokens + 1))
    [law] = step_laws(chain, [request])
    return sum(weight * len(block.token_ids) for block, weight in law.items())


def most_tokens(seed: int, num_speculative_tokens: int) -> float:
    """1 + Σ_i Σ min(p, q) over the joint laws of i tokens: no rule over a chain emits more a step [Sun2025, Lemma 2]."""
    target, draft = (random_table(3, 5, seed=2 * seed + which) for which in (0, 1))
    p = q = torch.ones(1, dtype=torch.float64)
    total = 1.0
    for length in range(1, num_speculative_tokens + 1):
        first = slice(0, 3 ** (length - 1))  # the prefixes that begin with the prompt, id 0
        p, q = (
            (mass[:, None] * table.levels[length][first].exp()).flatten() for mass, table in ((p, target), (q, draft))
        )
        total += float(torch.minimum(p, q).sum())
    return total


@pytest.mark.parametrize("seed", range(6))
def test_a_block_accepts_no_less_than_a_chain_and_no_more_than_can_be(seed: int) -> None:
    """More than a chain at three drafts, the same at one, which is then the most [Sun2025, Thm. 2]."""
    block, chain = (tokens_in_a_step(rule, seed, 3) for rule in (block_verification, chain_rejection))
    assert chain < block <= most_tokens(seed, 3) + TOLERANCE
    block, chain = (tokens_in_a_step(rule, seed, 1) for rule in (block_verification, chain_rejection))
    assert block == pytest.approx(chain, abs=TOLERANCE)
    assert block == pytest.approx(most_tokens(seed, 1), abs=TOLERANCE)


def test_the_bound_on_blocks_fails_on_a_rule_that_accepts_too_much() -> None:
    """`block-coins-of-chain` keeps the longest prefix whose own ratio falls."""
    [fault] = (each for each in TREE_FAULTS if each.name == "block-coins-of-chain")
    table = random_table(3, 1, seed=0)
    rule = fault.apply(Decoder(target=table, drafter=DraftModel(table, 3))).rule
    assert max(tokens_in_a_step(rule, seed, 3) - most_tokens(seed, 3) for seed in range(4)) > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_traversal_of_a_chain_is_block_verification(seed: int) -> None:
    """Step for step: the same law of what is emitted, and of how much of it was accepted."""
    laws = []
    for rule in (traversal, block_verification):
        target, draft = (random_table(3, 4, seed=2 * seed + which, zeros=0.2) for which in (0, 1))
        chain = Decoder(target=target, drafter=DraftModel(draft, 3), rule=rule, num_speculative_tokens=3)
        request = DecodeRequest(id="t", prompt_ids=(0,), params=SamplingParams(max_new_tokens=3))
        [law] = step_laws(chain, [request])
        laws.append({(block.token_ids, block.num_accepted_tokens): weight for block, weight in law.items()})
    first, second = laws
    assert max(abs(first.get(key, 0) - second.get(key, 0)) for key in {*first, *second}) <= TOLERANCE


def test_lossy_rules_are_not_lossless() -> None:
    """What is registered as lossy by design does change the law; nothing is lossy by mistake of the table."""
    for name, named in RULES.items():
        if not named.lossless:
            target, draft = pairs()[0][1:]
            chain = Decoder(target=target, drafter=DraftModel(draft, 3), rule=named.rule, num_speculative_tokens=2)
            asked = {"max_new_tokens": 3}
            assert total_variation(decoded_law(chain, **asked), autoregressive_law(target, **asked)) > 1e-3, name
