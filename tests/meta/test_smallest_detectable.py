"""What a check says it would have seen is seen, and half of it is not: `smallest_detectable` is true within a factor of two."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specverify.statistics.interval import clopper_pearson
from specverify.statistics.poisson_binomial import (
    poisson_binomial_tail,
    samples_needed_share,
    smallest_detectable_share,
)
from specverify.statistics.sequential import (
    e_value_samples_needed,
    likelihood_ratio_bets,
    smallest_detectable_kl,
)
from specverify.statistics.two_sample import samples_needed_signs, sign_bets, smallest_detectable_signs

RATES = {"false_fail_rate": 1e-6, "false_pass_rate": 0.1}
RUNS = 60


def reliably(caught: int) -> bool:
    """Whether nine in ten are not ruled out."""
    return clopper_pearson(caught, RUNS, confidence=1 - 1e-4).high >= 0.9


# ------------------------------------------------------------------------------------------------ signs of two arms


@pytest.mark.parametrize("effect", [0.05, 0.2, 0.6])
def test_the_pairs_that_are_needed_are_those_that_see_it(effect: float) -> None:
    """One design is the inverse of the other."""
    number = samples_needed_signs(effect, **RATES)
    assert effect / 2 <= smallest_detectable_signs(number, **RATES) <= effect * (1 + 1e-9)
    assert smallest_detectable_signs(number // 2, **RATES) > effect


@pytest.mark.parametrize("effect", [0.1, 0.4])
def test_a_difference_that_is_said_to_show_shows(effect: float) -> None:
    """In nine of ten runs with the pairs that it needs, and not in half as many."""
    random = np.random.default_rng(1)
    number = samples_needed_signs(effect, **RATES)
    shares = []
    for pairs in (number, number // 2):
        drawn = effect + math.sqrt(1 - effect**2) * random.standard_normal((RUNS, pairs))
        shares.append(sum(sign_bets(each).max() >= 6 for each in drawn))
    assert reliably(shares[0])
    assert not reliably(shares[1])


def test_too_few_pairs_show_nothing() -> None:
    """Not even if every text of one arm scores more: each pair tells a coin's ln 2 at most."""
    assert smallest_detectable_signs(10, **RATES) == math.inf
    assert smallest_detectable_signs(0, **RATES) == math.inf
    assert smallest_detectable_signs(60, **RATES) < 1


# ------------------------------------------------------------------------------------------------ flips of greedy texts


@pytest.mark.parametrize(("prob", "share"), [(1e-9, 0.003), (1e-3, 0.03), (0.05, 0.15)])
def test_the_tokens_that_are_needed_are_those_that_see_it(prob: float, share: float) -> None:
    """One design is the inverse of the other, but for the steps of a count."""
    number = samples_needed_share(share, prob, **RATES)
    assert share / 2 <= smallest_detectable_share(np.full(number, prob), **RATES) <= share * 1.0001
    assert smallest_detectable_share(np.full(max(1, number // 2), prob), **RATES) > share


def test_flips_that_are_said_to_show_show() -> None:
    """A share of a thousand tokens is flipped whatever its margin; half of that share is missed more often than promised."""
    random = np.random.default_rng(2)
    probs = stats.norm.sf(random.exponential(3, 1_000) * 4)
    share = smallest_detectable_share(probs, **RATES)
    caught = []
    for forced in (share, share / 2):
        flips = random.random((RUNS, len(probs))) < forced + (1 - forced) * probs
        caught.append(sum(poisson_binomial_tail(probs, int(each.sum())) <= 1e-6 for each in flips))
    assert reliably(caught[0])
    assert not reliably(caught[1])


def test_too_few_tokens_show_nothing() -> None:
    """Three coins may all flip."""
    assert smallest_detectable_share(np.full(3, 0.5), **RATES) == math.inf


# ------------------------------------------------------------------------------------------------ bets on a fault


@pytest.mark.parametrize("tilt", [0.1, 0.3, 1.0])
def test_a_growth_that_is_said_to_show_shows(tilt: float) -> None:
    """The law of forty ids, tilted: caught with the tokens that its divergence needs, and not with half of them."""
    random = np.random.default_rng(3)
    law = random.dirichlet(np.ones(40))
    fault = law * np.exp(tilt * random.standard_normal(40))
    fault /= fault.sum()
    nats = float((fault * np.log(fault / law)).sum())
    rates = {**RATES, "false_fail_rate": RATES["false_fail_rate"] / 3}  # three η
    number = e_value_samples_needed(nats, rates["false_fail_rate"], false_pass_rate=rates["false_pass_rate"])
    assert nats / 2 <= smallest_detectable_kl(number, **rates) <= nats
    shares = []
    for tokens in (number, number // 2):
        drawn = random.choice(40, (RUNS, tokens), p=fault)
        shares.append(sum(likelihood_ratio_bets((fault / law)[each]).max() >= 6 for each in drawn))
    assert reliably(shares[0])
    assert not reliably(shares[1])
