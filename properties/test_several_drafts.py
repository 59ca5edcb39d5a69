"""several drafts: over trees and blocks, every rule emits the target's law, and none accepts more than transport allows.

Faults that it must catch: those of `specverify.faults.tree`.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.oracle import pairs
from specverify.choices.enumerate import Enumerate, every_path
from specverify.decoding import Decoder
from specverify.drafting import TREES, DraftModel, drafter_for
from specverify.faults.tree import TREE_FAULTS
from specverify.law import autoregressive_law, decoded_law, step_laws, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification import Proposal, Rule
from specverify.verification.block import block_verification
from specverify.verification.chain import chain_rejection
from specverify.verification.k_sequence import division_factor, k_sequence
from specverify.verification.rules import RULES
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


def accepted_share(rule: Rule, p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """Probability that one of k independent siblings is accepted, over every path of drafting and verifying."""

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        drafts = q.expand(paths, k, -1)
        places = torch.arange(k)
        ids = choices.draw(drafts, stream=1, at=places)
        proposal = Proposal(ids, torch.full((paths,), k), drafts, torch.full((paths, k), -1))
        return rule(proposal, p.expand(paths, k + 1, -1), choices).num_accepted_tokens

    return sum(float((outcome * weight).sum()) for outcome, weight in every_path(program))


def transport_bound(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """a* = 1 + min over sets H of P(H) - Q(H)^k: what no rule over k independent drafts passes [SpecTr2023, Thm. 3]."""
    ids = range(len(p))
    subsets = (list(chosen) for size in range(len(p) + 1) for chosen in combinations(ids, size))
    return 1 + min(float(p[chosen].sum() - q[chosen].sum() ** k) for chosen in subsets)


@pytest.mark.parametrize("rule", [recursive_rejection, k_sequence], ids=lambda rule: rule.__name__)
@given(seed=SEEDS, k=st.integers(1, 3))
def test_no_rule_accepts_more_than_transport_allows(rule: Rule, seed: int, k: int) -> None:
    """And with one draft every rule reaches Σ min(p, q)."""
    p, q = rows(seed)
    share, most = accepted_share(rule, p, q, k), transport_bound(p, q, k)
    assert share <= most + 1e-9
    if k == 1:
        assert share == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


def test_a_rule_that_accepts_everything_passes_the_bound() -> None:
    """The bound can fail."""

    def everything(proposal: Proposal, target_probs: torch.Tensor, choices: Enumerate) -> object:
        return recursive_rejection(proposal, torch.ones_like(target_probs), choices)

    p, q = rows(3)
    assert accepted_share(everything, p, q, 2) > transport_bound(p, q, 2) + 1e-3


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


@pytest.mark.parametrize("seed", range(6))
def test_a_block_accepts_no_less_than_a_chain(seed: int) -> None:
    """More at three drafts, the same at one [Sun2025, Thm. 2]."""
    block, chain = (tokens_in_a_step(rule, seed, 3) for rule in (block_verification, chain_rejection))
    assert block > chain
    assert tokens_in_a_step(block_verification, seed, 1) == pytest.approx(tokens_in_a_step(chain_rejection, seed, 1))


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
