"""Chi-square over a law: by hand, against scipy, its support rule, its pooling, its design."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.categorical import chi_square, pool, samples_needed_tv, smallest_detectable_tv

RATES = {"false_fail_rate": 5e-7, "false_pass_rate": 0.1}


def zipf(size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A law with a long tail."""
    return (1 / np.arange(1, size + 1)) / (1 / np.arange(1, size + 1)).sum()


def test_statistic_is_the_likelihood_ratio() -> None:
    """By hand: 2 (60 ln 1.2 + 40 ln 0.8); and as scipy has it."""
    outcome = chi_square(np.array([60, 40]), np.array([0.5, 0.5]))
    assert outcome.statistic == pytest.approx(2 * (60 * math.log(1.2) + 40 * math.log(0.8)))
    assert outcome.statistic == pytest.approx(stats.power_divergence([60, 40], lambda_=0).statistic)
    assert (outcome.degrees_of_freedom, outcome.num_samples) == (1, 100)


@pytest.mark.parametrize("heads", [60, 75, 90, 100])
def test_p_value_bounds_the_exact_binomial_tail(heads: int) -> None:
    """For a coin the tail is a binomial one: the p-value is never below it, and at most 200 times above."""
    exact = stats.binomtest(heads, 100).pvalue
    p_value = chi_square(np.array([heads, 100 - heads]), np.array([0.5, 0.5])).p_value
    assert exact <= p_value <= 200 * exact


def test_one_impossible_token_is_enough() -> None:
    """A count in a cell of probability 0 has p-value 0, however few, and whatever the rest."""
    outcome = chi_square(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0]))
    assert outcome.p_value == 0
    assert outcome.statistic == math.inf


def test_impossible_cells_that_stay_empty_do_not_count() -> None:
    """They add no degree of freedom."""
    outcome = chi_square(np.array([50, 50, 0]), np.array([0.5, 0.5, 0.0]))
    assert (outcome.p_value, outcome.degrees_of_freedom, outcome.statistic) == (1, 1, 0)


def test_pooling_packs_rare_cells_in_the_order_of_their_probability() -> None:
    """Each group expects about 5, likely cells stay alone, and impossible ones are in none."""
    law = np.array([0.0, *zipf(1000)])
    cells = pool(law, 500)
    assert cells[0] == -1
    expected = np.bincount(cells[1:], weights=500 * law[1:])
    assert expected.min() >= 2.5
    assert expected[expected < 500 * zipf(1000)[5]].max() <= 10
    assert (np.diff(cells[1:]) >= 0).all()
    assert set(cells[1:]) == set(range(len(expected)))


@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_too_few_samples_say_nothing(num_samples: int) -> None:
    """All cells are pooled to one: p-value 1, and nothing is detectable."""
    counts = np.zeros(50, dtype=np.int64)
    counts[0] = num_samples
    assert chi_square(counts, zipf(50)).p_value == 1
    assert smallest_detectable_tv(zipf(50), num_samples, **RATES) == 1


def test_a_planted_temperature_is_seen_at_a_large_vocabulary() -> None:
    """2,000 tokens over 1,000 ids at temperature 1.25."""
    law = zipf(1000)
    hotter = law**0.8 / (law**0.8).sum()
    counts = np.random.default_rng(3).multinomial(2000, hotter)
    assert chi_square(counts, law).p_value < RATES["false_fail_rate"]
    assert chi_square(np.random.default_rng(3).multinomial(2000, law), law).p_value > 0.1


@pytest.mark.parametrize("law", [[0.5, 0.6], [1.5, -0.5], [math.nan, 1.0]])
def test_what_is_no_law_is_a_bug(law: list[float]) -> None:
    """Probabilities below 0, of another sum, or NaN are refused."""
    with pytest.raises(InternalError, match="sum to 1"):
        chi_square(np.array([1, 1]), np.array(law))


def test_counts_of_another_shape_are_a_bug() -> None:
    """Counts of another vocabulary are refused."""
    with pytest.raises(InternalError, match="don't go with"):
        chi_square(np.array([1, 1, 1]), np.array([0.5, 0.5]))


def test_smallest_detectable_tv_is_that_of_the_hardest_direction() -> None:
    """Its noncentrality 4 n TV² takes a chi-square of 15 degrees over the critical value nine times in ten."""
    uniform = np.full(16, 1 / 16)
    detectable = smallest_detectable_tv(uniform, 20_000, **RATES)
    assert detectable == pytest.approx(0.0304, abs=5e-4)
    limit = stats.ncx2.sf(stats.chi2.isf(5e-7, 15), 15, 4 * 20_000 * detectable**2)
    assert 0.9 < limit < 0.97


def test_samples_needed_inverts_smallest_detectable() -> None:
    """Also where pooling depends on the number of samples."""
    for law in (np.full(16, 1 / 16), zipf(300)):
        needed = samples_needed_tv(law, 0.1, **RATES)
        assert smallest_detectable_tv(law, needed, **RATES) <= 0.1
        assert smallest_detectable_tv(law, int(needed * 0.97), **RATES) > 0.1


def test_a_vocabulary_of_50_000_is_tested() -> None:
    """Pooling holds the work down, also where the p-value has to be computed."""
    law = zipf(50_000)
    counts = np.random.default_rng(4).multinomial(10_000, law**0.95 / (law**0.95).sum())
    assert 0 < chi_square(counts, law).p_value < 1
