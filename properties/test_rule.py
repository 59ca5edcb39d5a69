"""support and acceptance: what one step of a rule may do, at every uniform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.scripted import Scripted
from specverify.decoding import Decoder
from specverify.drafting import NoDraft
from specverify.faults import find_fault
from specverify.models.table import random_table
from specverify.verification import Proposal, Rule
from specverify.verification.rules import RULES

SEEDS = st.integers(0, 2**20)


def laws(seed: int, zeros: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    """Target rows [1, 2, 4] and a draft row [1, 1, 4] with zeros on either side."""
    rows = random_table(4, 1, seed=seed, zeros=zeros).levels[1].exp()
    return rows[None, :2], rows[None, 2:3]


def emits_only_the_possible(rule: Rule, seed: int, uniform: float) -> None:
    """Whatever id is drafted, and at any uniform, the step's first token has target probability above 0."""
    target_probs, draft_probs = laws(seed)
    script = Scripted(dict.fromkeys(Stream, uniform))
    for token in draft_probs[0, 0].nonzero().flatten().tolist():
        proposal = Proposal(torch.tensor([[token]]), torch.tensor([1]), draft_probs)
        verification = rule(proposal, target_probs, script)
        first = token if verification.num_accepted_tokens[0] else int(verification.next_token_ids[0])
        assert target_probs[0, 0, first] > 0, f"id {first} was emitted at u = {uniform}"


def accepted_share(rule: Rule, seed: int) -> tuple[float, float]:
    """Probability that a draft drawn from q is accepted, over every path, and Σ min(p, q)."""
    target_probs, draft_probs = laws(seed, zeros=0.0)
    total = 0.0
    for token, drawn in enumerate(draft_probs[0, 0].tolist()):

        def program(choices: Enumerate, token: int = token) -> torch.Tensor:
            paths = len(choices.records)
            proposal = Proposal(
                torch.full((paths, 1), token), torch.ones(paths, dtype=torch.int64), draft_probs.expand(paths, -1, -1)
            )
            return rule(proposal, target_probs.expand(paths, -1, -1), choices).num_accepted_tokens

        total += drawn * sum(float((paths * weights).sum()) for paths, weights in every_path(program))
    return total, float(torch.minimum(target_probs[0, 0], draft_probs[0, 0]).sum())


@pytest.mark.parametrize("name", ["chain", "match"])
@given(seed=SEEDS, uniform=st.sampled_from([0.0, 0.3, 0.5, 1 - 2**-53]))
def test_impossible_tokens_are_never_emitted(name: str, seed: int, uniform: float) -> None:
    """At u = 0 and at the largest uniform, too."""
    emits_only_the_possible(RULES[name].rule, seed, uniform)


@given(seed=SEEDS)
def test_acceptance_is_the_overlap(seed: int) -> None:
    """Chain rejection accepts with probability Σ min(p, q), exactly."""
    actual, expected = accepted_share(RULES["chain"].rule, seed)
    assert actual == pytest.approx(expected, abs=1e-12)


def faulty(name: str) -> Rule:
    """The rule of a planted fault."""
    table = random_table(4, 1, seed=0)
    return find_fault(name).apply(Decoder(target=table, drafter=NoDraft(4))).rule


@pytest.mark.parametrize("name", ["accept-or-equal", "always-accept"])
def test_support_fails_on_its_faults(name: str) -> None:
    """Some table has a draft that the target can't emit, and u = 0 finds it."""

    def over_many_tables() -> None:
        for seed in range(50):
            emits_only_the_possible(faulty(name), seed, 0.0)

    with pytest.raises(AssertionError, match="was emitted"):
        over_many_tables()


@pytest.mark.parametrize("name", ["ratio-inflated", "ratio-square-root", "always-accept"])
def test_acceptance_fails_on_its_faults(name: str) -> None:
    """More acceptance than the overlap is lossy."""
    actual, expected = accepted_share(faulty(name), 1)
    assert actual > expected + 1e-3
