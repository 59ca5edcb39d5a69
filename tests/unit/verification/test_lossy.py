"""Lossy rules: their bias in closed form is what the rule really does."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.lossy import LOSSY, LossyRule, bias, ensemble


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
