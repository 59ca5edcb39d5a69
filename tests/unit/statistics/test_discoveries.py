"""e-BH finds what is broken and no more than its rate of what is not; calibrators and means stay e-values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specverify.errors import InternalError
from specverify.statistics.discoveries import calibrated, e_benjamini_hochberg, merged

RATE = 0.1


def evidence(rng: np.random.Generator, shift: np.ndarray) -> np.ndarray:
    """log10 likelihood ratios of N(1.5, 1) against N(0, 1), a common error in all of them: e-values that depend."""
    seen = shift + math.sqrt(0.5) * rng.standard_normal(len(shift)) + math.sqrt(0.5) * rng.standard_normal()
    return (1.5 * seen - 1.5**2 / 2) / math.log(10)


def test_false_discovery_rate() -> None:
    """Over 4,000 matrices of 20 dependent cells with 5 broken ones: the rate is held, and the broken are found.

    The rate that e-BH promises is 0.1 · 15/20; the mean of 4,000 proportions lies within 5 of its standard errors below it.
    """
    rng = np.random.default_rng(3)
    shift = np.r_[np.full(5, 4.0), np.zeros(15)]
    proportions, found = [], 0
    for _ in range(4_000):
        named = np.array(e_benjamini_hochberg(evidence(rng, shift).tolist(), RATE))
        proportions.append(named[5:].sum() / max(1, named.sum()))
        found += int(named[:5].sum())
    error = np.std(proportions) / math.sqrt(len(proportions))
    assert np.mean(proportions) <= RATE * 15 / 20 + 5 * error
    assert found / (5 * 4_000) > 0.6


def test_healthy_matrices_are_seldom_accused() -> None:
    """If nothing is broken, any discovery is a false alarm of the whole matrix."""
    rng = np.random.default_rng(4)
    alarms = sum(any(e_benjamini_hochberg(evidence(rng, np.zeros(20)).tolist(), RATE)) for _ in range(4_000))
    assert alarms / 4_000 <= RATE


def test_a_rule_without_correction_would_be_caught() -> None:
    """The planted fault: every e-value against 1/rate alone, as if there were one cell. The test above must see it."""
    rng = np.random.default_rng(5)
    shift = np.r_[np.full(1, 4.0), np.zeros(199)]
    proportions = []
    for _ in range(1_000):
        named = evidence(rng, shift) >= 1
        proportions.append(named[1:].sum() / max(1, named.sum()))
    assert np.mean(proportions) > 2 * RATE


@pytest.mark.parametrize(
    ("log10_e", "expected"),
    [([], ()), ([1.0], (True,)), ([0.99], (False,)), ([math.inf, 0.0], (True, False)), ([1.0, 1.0], (True, True)), ([1.0, 0.9], (False, False))],
)  # fmt: skip
def test_thresholds(log10_e: list[float], expected: tuple[bool, ...]) -> None:
    """N / (k rate), reached or not; ties fall together."""
    assert e_benjamini_hochberg(log10_e, RATE) == expected


def test_calibrator_is_an_e_value() -> None:
    """Its mean over a uniform p-value is 1 at most, and it falls as p rises."""
    least = 1e-12  # the integral from there to 1 is 1 + (1 - least) / ln(least), the average of 1 - least^κ
    logs = np.linspace(0, -math.log(least), 20_001)
    density = np.array([10 ** calibrated(p) * p for p in np.exp(-logs)])
    assert np.trapezoid(density, logs) == pytest.approx(1 + (1 - least) / math.log(least), abs=1e-4)
    values = [calibrated(p) for p in np.geomspace(1e-12, 1, 200)]
    assert values == sorted(values, reverse=True)
    assert calibrated(0.0) == math.inf
    assert abs(calibrated(1 - 1.01e-4) - calibrated(1.0)) < 1e-3
    with pytest.raises(InternalError):
        calibrated(1.1)


@given(st.lists(st.floats(-50, 300), min_size=1, max_size=8))
def test_mean_lies_between(log10_e: list[float]) -> None:
    """No overflow, whatever is averaged."""
    assert min(log10_e) - 1e-9 <= merged(log10_e) <= max(log10_e) + 1e-9


def test_nothing_and_nan() -> None:
    """No test is no evidence; NaN is a bug."""
    assert merged([]) == 0
    assert merged([math.inf, 0.0]) == math.inf
    with pytest.raises(InternalError):
        e_benjamini_hochberg([math.nan], RATE)
