"""Uniformity: statistics by hand, p-values of scipy, designs that invert each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.uniformity import (
    bin_numbers,
    chi_square_uniform,
    kolmogorov_distance_bound,
    kolmogorov_smirnov,
    samples_needed_kolmogorov,
    samples_needed_uniform_tv,
    smallest_detectable_kolmogorov,
    smallest_detectable_uniform_tv,
)

RATES = {"false_fail_rate": 5e-7, "false_pass_rate": 0.1}


def test_ks_of_one_value_is_known_by_hand() -> None:
    """One value at u: the statistic is max(u, 1 - u), and its null law is P(D >= d) = 2 (1 - d)."""
    outcome = kolmogorov_smirnov(np.array([0.3]))
    assert outcome.statistic == pytest.approx(0.7)
    assert outcome.p_value == pytest.approx(0.6)
    assert outcome.num_samples == 1


@pytest.mark.parametrize("num_samples", [4, 7, 12])
def test_ks_tail_is_exact_far_out(num_samples: int) -> None:
    """All values at 1 - d: the statistic is d, and for d > 1/2 the tail is twice Birnbaum and Tingey's sum."""
    distance = 0.9 if num_samples < 10 else 0.85
    values = np.full(num_samples, 1 - distance)
    terms = (
        math.comb(num_samples, j)
        * (1 - distance - j / num_samples) ** (num_samples - j)
        * (distance + j / num_samples) ** (j - 1)
        for j in range(math.floor(num_samples * (1 - distance)) + 1)
    )
    outcome = kolmogorov_smirnov(values)
    assert outcome.p_value == pytest.approx(2 * distance * sum(terms), rel=1e-6)
    assert outcome.p_value < 1e-3


def test_ks_sees_a_planted_shift() -> None:
    """U² is a distance of 1/4 from uniform."""
    values = np.random.default_rng(1).random(400) ** 2
    assert kolmogorov_smirnov(values).p_value < RATES["false_fail_rate"]


@pytest.mark.parametrize("values", [[0.2, 1.1], [-1e-9], [math.nan]])
def test_values_that_are_no_pit_are_a_bug(values: list[float]) -> None:
    """A value outside [0, 1] can't come from a CDF: refuse it instead of testing it."""
    for test in (kolmogorov_smirnov, chi_square_uniform):
        with pytest.raises(InternalError, match=r"lie in \[0, 1\]"):
            test(np.array(values))


def test_no_values_say_nothing() -> None:
    """An empty stream has p-value 1 and can see nothing."""
    assert kolmogorov_smirnov(np.empty(0)).p_value == 1
    assert chi_square_uniform(np.empty(0)).p_value == 1
    assert smallest_detectable_kolmogorov(0, **RATES) == 1
    assert smallest_detectable_uniform_tv(0, **RATES) == 1
    assert kolmogorov_distance_bound(0.0, 0, false_pass_rate=0.1) == 1


def test_bins_are_half_open_but_for_the_last() -> None:
    """0.25 begins the second of four bins, and 1 belongs to the last."""
    assert bin_numbers(np.array([0, 0.2499, 0.25, 0.999, 1]), 4).tolist() == [0, 0, 1, 3, 3]


def test_chi_square_sees_a_hump_that_ks_is_slow_to_see() -> None:
    """Alternating heavy and light bins: TV 0.15, Kolmogorov distance 0.019."""
    rng = np.random.default_rng(2)
    share = np.where(np.arange(16) % 2, 1.3, 0.7) / 16
    values = (rng.choice(16, 3000, p=share) + rng.random(3000)) / 16
    assert chi_square_uniform(values).p_value < RATES["false_fail_rate"]
    assert kolmogorov_smirnov(values).p_value > 1e-3


def test_kolmogorov_design_is_critical_value_plus_half_width() -> None:
    """At n = 20,000 and the run's rates: 0.0195 + 0.0076."""
    critical = stats.kstwo.isf(RATES["false_fail_rate"], 20_000)
    assert smallest_detectable_kolmogorov(20_000, **RATES) == pytest.approx(
        critical + math.sqrt(math.log(10) / 40_000), rel=1e-12
    )
    assert smallest_detectable_kolmogorov(20_000, **RATES) == pytest.approx(0.0271, abs=2e-4)


@pytest.mark.parametrize("distance", [0.3, 0.05, 0.02])
def test_samples_needed_inverts_smallest_detectable(distance: float) -> None:
    """That many samples are enough, and one fewer is not."""
    needed = samples_needed_kolmogorov(distance, **RATES)
    assert smallest_detectable_kolmogorov(needed, **RATES) <= distance
    assert smallest_detectable_kolmogorov(needed - 1, **RATES) > distance
    needed = samples_needed_uniform_tv(distance, **RATES)
    assert smallest_detectable_uniform_tv(needed, **RATES) <= distance


@pytest.mark.parametrize(("half_width", "num_samples"), [(0.05, 2_902), (0.02, 18_136), (0.01, 72_544)])
def test_distance_bound_has_the_widths_of_the_study(half_width: float, num_samples: int) -> None:
    """Statement C at 1e-6: half widths 0.05, 0.02 and 0.01."""
    bound = kolmogorov_distance_bound(0.1, num_samples, false_pass_rate=1e-6)
    assert bound == pytest.approx(0.1 + half_width, abs=5e-6)
