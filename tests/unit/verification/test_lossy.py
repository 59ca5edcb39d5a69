"""Lossy rules: their bias in closed form is what the rule really does."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.scripted import Scripted
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.lossy import LOSSY, LossyRule, bias, ensemble, relaxed_top_k, within_mass


def stepped(rule: LossyRule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The law of the first token of a one-draft step, over every path."""
    law = torch.zeros_like(p)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        ids = choices.draw(q.expand(paths, 1, -1), stream=Stream.DRAFT, at=torch.tensor([0]))
        proposal = Proposal(ids, torch.ones(paths, dtype=torch.int64), q.expand(paths, 1, -1))
        verification = rule(proposal, p.expand(paths, 2, -1), choices)
        return torch.where(verification.num_accepted_tokens > 0, ids[:, 0], verification.next_token_ids)

    for outcome, weight in every_path(program):
        law.index_add_(0, outcome, weight)
    return law


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSY)
def test_the_bias_is_that_of_the_rule(name: str, seed: int):
    """Against every path of the rule itself."""
    p, q = random_table(5, 1, seed=seed, zeros=0.2).levels[1].exp()[:2]
    expected = float((stepped(LOSSY[name], p, q) - p).abs().sum() / 2)
    assert float(bias(LOSSY[name], p[None], q[None])) == pytest.approx(expected, abs=1e-12)


def test_an_ensemble_emits_exactly_the_mixture():
    """W p + (1 - w) q, so it is lossless with respect to that, and off from p by (1 - w) TV."""
    p, q = random_table(5, 1, seed=9).levels[1].exp()[:2]
    law = stepped(LOSSY["ensemble"], p, q)
    assert law.tolist() == pytest.approx((0.8 * p + 0.2 * q).tolist(), abs=1e-12)


def test_with_no_weight_on_the_draft_an_ensemble_is_lossless():
    """The bias can be 0."""
    p, q = random_table(5, 1, seed=9).levels[1].exp()[:2]
    exact = LossyRule(lambda p, q: ensemble(p, q, weight=1.0), from_residual=True)
    assert float(bias(exact, p[None], q[None])) == pytest.approx(0, abs=1e-12)


def test_relaxed_top_k_accepts_nothing_impossible():
    """Where fewer than k ids have any probability."""
    p = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)
    assert LOSSY["relaxed-top-k"].accepts(p, torch.full_like(p, 1 / 3)).tolist() == [[1.0, 1.0, 0.0]]


P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.2, 0.0, 0.2, 0.6]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.6, 0.1, 0.05], [0.4, 0.3, 0.1, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        # entropies of 1.030 and 0.950 nats: 0.3 exp(-H) is 0.107 and 0.116, above 0.09
        ("typical", [[1, 1, 1, 0], [1, 0, 1, 1]]),
        ("threshold", [[1, 1, 1, 0], [0.5, 0, 1, 1]]),
        ("cumulative-threshold", [[1, 1, 1, 0], [1, 0, 1, 1]]),
        ("ensemble", [[1, 0.6, 1, 0.2], [0.6, 0.2, 1, 1]]),
        ("relaxed-top-k", [[1, 1, 1, 0], [1, 0, 1, 1]]),
    ],
)
def test_each_rule_accepts_what_its_source_says(name: str, accepted: list[list[float]]):
    """Worked out by hand, each row by itself."""
    found = LOSSY[name].accepts(P, Q)
    assert found.dtype == P.dtype
    assert torch.allclose(found, torch.tensor(accepted, dtype=P.dtype), rtol=0, atol=1e-15)


def test_typical_acceptance_compares_with_the_rows_own_entropy():
    """A flat row lowers its own threshold, δ exp(-H) = 0.3 / V, and what stands exactly on one is refused."""
    flat = torch.full((1, 8), 1 / 8, dtype=torch.float64)
    assert LOSSY["typical"].accepts(flat, flat).tolist() == [[1.0] * 8]
    sharp = torch.tensor([[0.92, 0.08]], dtype=torch.float64)  # min(0.09, 0.3 exp(-0.28)) = 0.09
    assert LOSSY["typical"].accepts(sharp, sharp).tolist() == [[1.0, 0.0]]
    edge = torch.tensor([[0.91, 0.09]], dtype=torch.float64)
    assert LOSSY["typical"].accepts(edge, edge).tolist() == [[1.0, 0.0]]


def test_borders_belong_where_the_docstrings_put_them():
    """At least the threshold; less than the mass before it; a set of k ids and a distance, both."""
    law = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    assert LOSSY["threshold"].accepts(law, torch.tensor([[0.9, 0.1]], dtype=torch.float64)).tolist() == [[1.0, 1.0]]
    halves = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
    assert within_mass(halves, halves, mass=0.5).tolist() == [[0.0, 1.0, 0.0]]
    assert relaxed_top_k(P, Q, k=2, delta=1.0).tolist() == [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]]
    assert relaxed_top_k(halves, halves, k=3, delta=0.25).tolist() == [[1.0, 1.0, 1.0]]
    assert relaxed_top_k(halves, halves, k=3, delta=0.2).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", LOSSY)
def test_the_bias_of_a_row_is_its_own(name: str):
    """Together, in any shape, as each alone."""
    p, q = (random_table(5, 1, seed=seed, zeros=0.2).levels[1].exp()[:4].view(2, 2, 5) for seed in (1, 2))
    together = bias(LOSSY[name], p, q)
    assert together.shape == (2, 2)
    alone = [float(bias(LOSSY[name], p[i, j][None], q[i, j][None])) for i in range(2) for j in range(2)]
    assert together.flatten().tolist() == pytest.approx(alone, abs=1e-15)


def test_the_draw_after_a_chain_has_the_stream_and_the_law_of_its_place():
    """Replaced from the target after a rejection, a bonus after none; each with uniforms of its own."""
    ids, lengths = torch.tensor([[0, 0], [0, 0]]), torch.tensor([2, 2])
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]] * 2, dtype=torch.float64)
    p[1, 1] = torch.tensor([0.0, 1.0])  # never accepted by `typical`
    rule = LOSSY["typical"]
    proposal = Proposal(ids, lengths, p[:, :2])
    low, high = (
        rule(proposal, p, Scripted({Stream.RESIDUAL: other, Stream.BONUS: bonus}))
        for other, bonus in ((0.9, 0.1), (0.1, 0.9))
    )
    assert low.num_accepted_tokens.tolist() == [2, 1]
    assert low.next_token_ids.tolist() == [0, 1]
    assert high.next_token_ids.tolist() == [1, 1]
