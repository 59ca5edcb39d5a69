"""Intervals: by hand, against scipy, and where data say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.interval import (
    clopper_pearson,
    cluster_interval,
    paired_ratio_interval,
    zero_failures_bound,
)


def test_equal_clusters_give_the_t_interval_of_their_means() -> None:
    """The unit is the prompt, whatever its tokens do."""
    values = np.random.default_rng(8).random((6, 20)) + np.arange(6)[:, None]
    interval = cluster_interval(values.ravel(), np.repeat(np.arange(6), 20))
    by_hand = stats.ttest_1samp(values.mean(1), 0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx(tuple(by_hand))
    assert interval.estimate == pytest.approx(values.mean())


def test_unequal_clusters_weigh_by_their_tokens() -> None:
    """Two prompts, of 1 and 3 tokens: mean 0.75, residuals ∓0.75, standard error √(2 · 2 · 0.75²) / 4."""
    interval = cluster_interval(np.array([0.0, 1, 1, 1]), np.array(["a", "b", "b", "b"]))
    half = stats.t.ppf(0.975, 1) * math.sqrt(2 * 2 * 0.75**2) / 4
    assert (interval.estimate, interval.high - interval.estimate) == pytest.approx((0.75, half))


def test_one_cluster_cannot_be_bounded() -> None:
    """One prompt says nothing about others, however many tokens it has; no token says nothing at all."""
    interval = cluster_interval(np.array([0.2, 0.4]), np.array([7, 7]))
    assert (interval.estimate, interval.low, interval.high) == (pytest.approx(0.3), -math.inf, math.inf)
    nothing = cluster_interval(np.empty(0), np.empty(0))
    assert math.isnan(nothing.estimate)
    assert nothing.high == math.inf


def test_a_value_that_is_not_finite_is_a_bug() -> None:
    """NaN would otherwise hide in the mean."""
    with pytest.raises(InternalError, match="finite"):
        cluster_interval(np.array([math.nan, 1.0]), np.array([0, 1]))


@pytest.mark.parametrize(("hits", "samples"), [(0, 10), (3, 10), (10, 10), (1, 16_680)])
def test_clopper_pearson_is_scipys(hits: int, samples: int) -> None:
    """The exact interval, at an extreme confidence too."""
    for confidence in (0.95, 1 - 2e-6):
        interval = clopper_pearson(hits, samples, confidence=confidence)
        expected = stats.binomtest(hits, samples).proportion_ci(confidence, method="exact")
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-6)
    assert interval.estimate == hits / samples


def test_one_mismatch_bounds_tv_as_in_the_study() -> None:
    """Statement A: one mismatch in 16,680 draws still gives 1e-3 at 1e-6, one-sided."""
    assert clopper_pearson(1, 16_680, confidence=1 - 2e-6).high == pytest.approx(1e-3, rel=1e-3)


def test_no_sample_bounds_nothing() -> None:
    """[0, 1], and hits beyond the samples are a bug."""
    interval = clopper_pearson(0, 0)
    assert (interval.low, interval.high) == (0, 1)
    assert math.isnan(interval.estimate)
    with pytest.raises(InternalError):
        clopper_pearson(2, 1)


@pytest.mark.parametrize(("samples", "bound"), [(1_375, 1e-2), (13_809, 1e-3), (138_149, 1e-4), (0, 1.0)])
def test_no_mismatch_bounds_tv_as_in_the_study(samples: int, bound: float) -> None:
    """Statement A: ln(1/rate) / n."""
    assert zero_failures_bound(samples, 1e-6) == pytest.approx(bound, rel=1e-3)
    if samples:
        assert (1 - zero_failures_bound(samples, 1e-6)) ** samples == pytest.approx(1e-6, rel=1e-6)


def test_the_ratio_interval_keeps_pairs_together_and_repeats_by_seed() -> None:
    """Times that double from minute to minute, always 20 % faster: the ratio is known exactly."""
    off = 2.0 ** np.arange(8)
    for of in ("total", "median"):
        interval = paired_ratio_interval(off, off / 1.2, seed=1, of=of)
        assert (interval.low, interval.estimate, interval.high) == pytest.approx((1.2, 1.2, 1.2))
    rng = np.random.default_rng(9)
    first, second = rng.gamma(50, 1, 12), rng.gamma(50, 1, 12)
    assert paired_ratio_interval(first, second, seed=3) == paired_ratio_interval(first, second, seed=3)
    assert paired_ratio_interval(first, second, seed=3) != paired_ratio_interval(first, second, seed=4)


def test_one_pair_cannot_be_bounded() -> None:
    """Infinite ends; and a time of 0 is a bug."""
    interval = paired_ratio_interval(np.array([3.0]), np.array([2.0]), seed=0)
    assert (interval.estimate, interval.low, interval.high) == (1.5, -math.inf, math.inf)
    with pytest.raises(InternalError, match="positive"):
        paired_ratio_interval(np.array([3.0]), np.array([0.0]), seed=0)
