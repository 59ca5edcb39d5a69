"""The parts that rules are made of, by hand, on the rows that a law rarely reaches: ids that nobody gives, equal laws, padding."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.philox import Philox
from specverify.verification import Proposal, draft_row_at, k_sequence
from specverify.verification.block import continuation
from specverify.verification.chain import acceptance_probs, residual
from specverify.verification.rules import RULES, Drafts

TREES = {Drafts.WITH_REPLACEMENT, Drafts.WITHOUT_REPLACEMENT, Drafts.TOP_K}


def doubles(*rows: object) -> torch.Tensor:
    """A float64 tensor."""
    return torch.tensor(rows, dtype=torch.float64)


def parents_of(name: str, count: int) -> torch.Tensor | None:
    """Siblings at the context, for a rule over trees."""
    return torch.full((1, count), -1) if RULES[name].drafts in TREES else None


def test_a_draft_is_accepted_with_the_ratio_of_its_probabilities():
    """1 where the target gives it as much or more, 0 where it gives nothing, the draft or not."""
    p = doubles([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    q = doubles([[0.25, 0.75, 0.0], [0.4, 0.3, 0.3], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    ids = torch.tensor([[0, 0, 0, 0]])
    assert acceptance_probs(Proposal(ids, torch.tensor([4]), q), p).tolist() == [[1, 0.5, 0, 0]]


def test_each_row_has_its_own_residual():
    """The target itself where nothing is left, whatever is left in the rows beside it."""
    p, q = doubles([0.5, 0.5], [0.75, 0.25]), doubles([0.5, 0.5], [0.25, 0.75])
    assert residual(p, q).tolist() == [[0.5, 0.5], [0.5, 0]]
    assert residual(p.flip(0), q.flip(0)).tolist() == [[0.5, 0], [0.5, 0.5]]


def test_a_block_of_which_nothing_is_missing_goes_on():
    """Z / (Z + 1 - P), and 1 where both are nothing."""
    assert continuation(doubles(0.0, 0.25, 0.0), doubles(1.0, 0.75, 0.5)).tolist() == [1, 0.5, 0]


def test_point_masses_end_with_the_drafts():
    """Zeros in the padding, as `Proposal` says."""
    proposal = Proposal.point_masses(torch.tensor([[2, 1], [0, 0]]), torch.tensor([2, 1]), 3)
    assert proposal.draft_probs.tolist() == [[[0, 0, 1], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]]
    assert proposal.draft_probs.dtype == torch.float64


def test_nothing_was_drafted_for_the_bonus():
    """Zeros after the last draft of a row, in a block that is longer and in one that is not; in one of no places, too."""
    proposal = Proposal.point_masses(torch.tensor([[2, 1], [1, 0]]), torch.tensor([2, 1]), 3)
    assert draft_row_at(proposal, torch.tensor([1, 0])).tolist() == [[0, 1, 0], [0, 1, 0]]
    assert draft_row_at(proposal, torch.tensor([2, 1])).tolist() == [[0, 0, 0]] * 2
    nothing = Proposal(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0, 3))
    assert draft_row_at(nothing, torch.tensor([0, 0])).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("name", [name for name, named in RULES.items() if named.lossless])
def test_an_id_that_nobody_gives_is_refused_on_every_path(name: str):
    """Neither law has it, as where a sampler pads: it is neither accepted nor drawn in its stead."""
    p = doubles(0.25, 0.75, 0.0).expand(1, 2, -1)
    q = doubles(0.75, 0.25, 0.0).expand(1, 1, -1)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        above = parents_of(name, 1)
        proposal = Proposal(
            torch.full((paths, 1), 2),
            torch.ones(paths, dtype=torch.int64),
            q.expand(paths, -1, -1),
            None if above is None else above.expand(paths, -1),
        )
        found = RULES[name].rule(proposal, p.expand(paths, -1, -1), choices)
        assert not found.num_accepted_tokens.any()
        return found.next_token_ids

    law = torch.zeros(3, dtype=torch.float64)
    for outcomes, weights in every_path(program):
        law.index_add_(0, outcomes, weights)
    assert law.sum() == pytest.approx(1)
    assert law[2] == 0


@pytest.mark.parametrize("name", RULES)
def test_a_vocabulary_of_one_id_leaves_no_choice(name: str):
    """Both models are certain, so everything is accepted."""
    ones = torch.ones(1, 2, 1, dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), ones[:, :1], parents_of(name, 1))
    found = RULES[name].rule(proposal, ones, Philox.start(torch.tensor([1]), torch.tensor([2])))
    assert (found.num_accepted_tokens.tolist(), found.next_token_ids.tolist()) == ([1], [0])


def test_a_chain_forks_no_path_after_a_rejection():
    """Two coins and the token: of two drafts the second is asked about where the first was accepted only."""
    p, q = doubles(0.25, 0.75), doubles(0.75, 0.25)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        proposal = Proposal(torch.zeros(paths, 2, dtype=torch.int64), torch.full((paths,), 2), q.expand(paths, 2, -1))
        return RULES["chain"].rule(proposal, p.expand(paths, 3, -1), choices).num_accepted_tokens

    found = torch.cat([outcomes for outcomes, _ in every_path(program)])
    assert found.bincount().tolist() == [1, 1, 2], "[p - q]+ is one id; the bonus is one of two"


def test_traversal_of_a_chain_decides_as_block_verification_does():
    """With the same uniforms: the same number of tokens and the same next one, where chains are of every length."""
    generator = torch.Generator().manual_seed(5)
    count = 400
    p, q = (torch.rand(count, 5, 4, generator=generator, dtype=torch.float64) ** 2 for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), (q / q.sum(-1, keepdim=True))[:, :4]
    ids = q.flatten(0, 1).multinomial(1, generator=generator).view(count, 4)
    proposal = Proposal(ids, torch.arange(count) % 5, torch.empty(0))
    proposal = Proposal(ids, proposal.num_draft_tokens, torch.where(proposal.drafted[..., None], q, 0))
    choices = Philox.start(torch.arange(count), torch.arange(count))
    block, traversed = (RULES[name].rule(proposal, p, choices) for name in ("block", "traversal"))
    assert torch.equal(traversed.num_accepted_tokens, block.num_accepted_tokens)
    assert torch.equal(traversed.next_token_ids, block.next_token_ids)
    assert block.num_accepted_tokens.unique().tolist() == [0, 1, 2, 3, 4]


def test_each_node_of_a_tree_has_a_coin_of_its_own():
    """Rules over trees ask at the node's place: a coin that two nodes share correlates them, which no single law shows."""

    class Asked:
        def __init__(self) -> None:
            self.places: list[int] = []

        def accept(self, prob: torch.Tensor, *, stream: Stream, at: torch.Tensor) -> torch.Tensor:
            assert stream is Stream.ACCEPT
            self.places += at.expand(prob.shape).flatten().tolist()
            return torch.zeros_like(prob, dtype=torch.bool)

        def draw(self, probs: torch.Tensor, **_: object) -> torch.Tensor:
            return probs.argmax(-1)

    even = torch.full((1, 4, 4), 0.25, dtype=torch.float64)
    for name in ("recursive", "recursive-without-replacement", "top-k-children", "k-sequence", "traversal"):
        asked, siblings = (
            Asked(),
            Proposal(torch.tensor([[1, 2, 3]]), torch.tensor([3]), even[:, :3], parents_of(name, 3)),
        )
        RULES[name].rule(siblings, even, asked)
        assert asked.places == [0, 1, 2], name


def test_the_factor_of_a_k_sequence_takes_few_steps(monkeypatch: pytest.MonkeyPatch):
    """Newton's steps have the root after ten, where halving alone would need fifty."""
    generator = torch.Generator().manual_seed(6)
    p, q = (torch.rand(2_000, 6, generator=generator, dtype=torch.float64) ** 4 for _ in range(2))
    p, q = (law / law.sum(-1, keepdim=True) for law in (p, q))
    siblings = torch.arange(2_000) % 15 + 2
    monkeypatch.setattr(k_sequence, "_MOST_STEPS", 10)
    r = k_sequence.division_factor(p, q, siblings)
    beta = torch.minimum(q, p / r[:, None]).sum(-1)
    assert float((1 - (1 - beta) ** siblings - r * beta).abs().max()) < 1e-14
    assert bool(((r >= 1) & (r <= siblings)).all())
