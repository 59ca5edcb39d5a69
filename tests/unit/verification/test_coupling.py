"""Coupled noise: the same text with and without speculation, and winners that agree as often as the formula says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specverify.choices.philox import Philox
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.table import random_table
from specverify.records import DecodeRequest, DecodeTrace, SamplingParams, count
from specverify.verification.chain import sample_and_match
from specverify.verification.coupling import gumbel_coupling, match_probability
from specverify.verification.rules import Drafts

TARGET, DRAFT = random_table(4, 9, seed=0, zeros=0.2), random_table(4, 9, seed=1, zeros=0.2)
DECODER = Decoder(
    target=TARGET, drafter=DraftModel(DRAFT, 4, coupled=True), rule=gumbel_coupling, drafts=Drafts.COUPLED
)


def texts(decoder: Decoder, algorithm: object) -> list[DecodeTrace]:
    """Sixty-four texts, each with a seed of its own, in the order in which they were asked for."""
    params = SamplingParams(max_new_tokens=7, eos_token_ids=(3,), temperature=0.9)
    rows = [Row(DecodeRequest(id=str(n), prompt_ids=(n % 4,), params=params, seed=n), 0) for n in range(64)]
    return sorted(algorithm(decoder, rows), key=lambda trace: int(trace.request.id))


def test_speculation_changes_no_token_at_any_temperature():
    """Bit for bit the target's own text with the same seed, and drafts are accepted."""
    on, off = texts(DECODER, speculative), texts(DECODER, autoregressive)
    assert [trace.token_ids for trace in on] == [trace.token_ids for trace in off]
    assert count(on).num_accepted_tokens > 20


def test_coupled_drafts_are_accepted_more_often_than_independent_ones():
    """The noise is shared by position; a draft of its own noise matches with Σ p q only."""
    coupled = count(texts(DECODER, speculative)).acceptance_rate
    free = replace(DECODER, drafter=DraftModel(DRAFT, 4), rule=sample_and_match, drafts=Drafts.CHAIN)
    assert coupled > count(texts(free, speculative)).acceptance_rate


def test_winners_agree_as_often_as_the_formula_says():
    """Within four standard errors of 40,000 races; an id of probability 0 never wins."""
    n = 40_000
    p, q = (law.exp()[None, None] for law in random_table(5, 1, seed=7, zeros=0.2).levels[1][:2])
    choices = Philox.start(torch.full((n,), 5), torch.arange(n))
    at = torch.tensor([0])
    first, second = (choices.race(law.expand(n, 1, -1), at=at)[:, 0] for law in (p, q))
    expected = float(match_probability(p, q))
    error = (expected * (1 - expected) / n) ** 0.5
    assert abs(float((first == second).double().mean()) - expected) < 4 * error
    shares = first.bincount(minlength=5) / n
    assert float((shares - p[0, 0]).abs().max()) < 4 * 0.5 / n**0.5
    assert not shares[p[0, 0] == 0].any()


def test_noise_is_keyed_by_position_and_not_by_step():
    """Another step sees the same race, another position or sequence another one."""
    law = torch.full((1, 1, 64), 1 / 64, dtype=torch.float64)
    here = Philox.start(torch.tensor([1]), torch.tensor([0]))
    at = torch.tensor([0])

    def winner(choices: Philox) -> int:
        return int(choices.race(law, at=at))

    later = here.moved(torch.tensor([0]), torch.tensor([3]))
    assert winner(here) == winner(later)
    others = {winner(here.moved(torch.tensor([place]), torch.tensor([0]))) for place in range(8)}
    assert len(others) > 4
    assert int(here.race(law, at=torch.tensor([2]))) == winner(here.moved(torch.tensor([2]), torch.tensor([0])))


def test_equal_laws_always_agree():
    """Then the match probability is 1."""
    p = random_table(5, 1, seed=3).levels[1].exp()
    assert match_probability(p, p).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize("seed", range(6))
def test_the_match_probability_is_the_double_sum(seed):
    """[Daliri2024, Thm. 3] term by term, where ids are impossible to one model or both."""
    p, q = (random_table(6, 1, seed=each, zeros=0.3).levels[1].exp() for each in (seed, seed + 100))
    wanted = [
        sum(
            1 / sum(max(py / px, qy / qx) for py, qy in zip(target, draft, strict=True))
            for px, qx in zip(target, draft, strict=True)
            if px > 0 and qx > 0
        )
        for target, draft in zip(p.tolist(), q.tolist(), strict=True)
    ]
    assert match_probability(p, q).tolist() == pytest.approx(wanted, abs=1e-14)
