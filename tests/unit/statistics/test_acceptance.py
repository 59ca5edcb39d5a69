"""Tokens per step from transcripts: by hand, against a simulation of blocks, and what to do with it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specverify.errors import InternalError
from specverify.statistics.acceptance import (
    best_num_speculative_tokens,
    geometric_tokens_per_step,
    speedup,
    tokens_per_step,
)


@pytest.mark.parametrize(
    ("acceptance", "num_speculative_tokens", "expected"),
    [
        ([1.0] * 8, 3, 4.0),  # two full blocks
        ([1.0] * 9, 3, 9 / 3),  # the open block counts
        ([0.0] * 5, 3, 1.0),  # every token is a replacement
        ([0.5, 0.5], 1, 2 / 1.5),  # the second token opens a block if the first was replaced
        ([0.5] * 3, 0, 1.0),  # no draft, no block longer than 1
        ([0.5, 0.25, 0.9], 1, 3 / (1 + 0.5 + (0.5 + 0.5 * 0.75))),
    ],
)
def test_the_programme_by_hand(acceptance: list[float], num_speculative_tokens: int, expected: float) -> None:
    """Tokens over expected blocks opened."""
    assert tokens_per_step(np.array(acceptance), num_speculative_tokens) == pytest.approx(expected)


def test_transcripts_do_not_share_blocks() -> None:
    """Each transcript opens a block of its own, also an empty one doesn't disturb; steps add up."""
    rng = np.random.default_rng(10)
    values = rng.random(30)
    parts = [values[:7], values[7:7], values[7:26], values[26:]]
    steps = sum(len(part) / tokens_per_step(part, 4) for part in parts if len(part))
    assert tokens_per_step(values, 4, boundaries=[0, 7, 7, 26]) == pytest.approx(30 / steps)
    assert math.isnan(tokens_per_step(np.empty(0), 3))


def test_it_predicts_what_blocks_do() -> None:
    """A lossless stream over sticky contexts, cut into blocks by flags: counted and predicted agree to 2 %."""
    rng = np.random.default_rng(11)
    laws_p, laws_q = rng.dirichlet(np.ones(6) * 0.5, 4), rng.dirichlet(np.ones(6) * 0.5, 4)
    laws_q[:2] = laws_p[:2] * 0.8 + laws_q[:2] * 0.2  # two easy contexts, two hard ones
    context, posterior, accept_rate = 0, [], []
    for _ in range(20_000):
        p, q = laws_p[context], laws_q[context]
        token = rng.choice(6, p=p)
        posterior.append(min(1.0, q[token] / p[token]))
        accept_rate.append(np.minimum(p, q).sum())
        context = context if rng.random() < 0.9 else int(rng.integers(4))
    accepted = rng.random(20_000) < np.array(accept_rate)  # independent of the token's posterior: the draft's view
    steps, place = 0, 0
    while place < len(accepted):
        drafted = accepted[place : place + 3]
        place += 4 if drafted.all() else int(drafted.argmin()) + 1
        steps += 1
    counted = 20_000 / steps
    assert tokens_per_step(np.array(posterior), 3) == pytest.approx(counted, rel=0.02)
    assert geometric_tokens_per_step(float(np.mean(accept_rate)), 3) > 1.02 * counted


def test_geometric_formula() -> None:
    """(1 - a^(g+1)) / (1 - a), and its limit at a = 1."""
    assert geometric_tokens_per_step(0.8, 3) == pytest.approx((1 - 0.8**4) / 0.2)
    assert geometric_tokens_per_step(1.0, 3) == 4


def test_constant_acceptance_meets_the_geometric_formula() -> None:
    """Where every position is equally hard the formula is right."""
    assert tokens_per_step(np.full(20_000, 0.7), 5) == pytest.approx(geometric_tokens_per_step(0.7, 5), rel=1e-3)


def test_speedup_is_tokens_over_cost() -> None:
    """3 tokens for 3 drafts of 0.1 and a verification of 1.2: 2 times."""
    assert speedup(3.0, num_speculative_tokens=3, draft_cost=0.1, verify_cost=1.2) == pytest.approx(2.0)


def test_best_number_weighs_tokens_against_cost() -> None:
    """A good, cheap draft pays with more tokens than a poor one; a dear one doesn't pay at all: 0 is best."""
    good, poor = np.full(500, 0.9), np.full(500, 0.5)
    cheap = {"draft_cost": 0.05, "verify_cost": lambda g: 1 + 0.01 * g}
    best_good, every = best_num_speculative_tokens(good, **cheap)
    best_poor, _ = best_num_speculative_tokens(poor, **cheap)
    assert best_good.num_speculative_tokens > best_poor.num_speculative_tokens > 0
    assert [each.num_speculative_tokens for each in every] == list(range(17))
    assert best_good.speedup == max(each.speedup for each in every) > 3
    dear, _ = best_num_speculative_tokens(poor, draft_cost=0.9, verify_cost=lambda _: 1.1)
    assert (dear.num_speculative_tokens, dear.speedup) == (0, 1.0)


def test_what_is_no_probability_is_a_bug() -> None:
    """An acceptance above 1, or NaN, is refused."""
    for value in (1.1, math.nan):
        with pytest.raises(InternalError):
            tokens_per_step(np.array([value]), 3)
