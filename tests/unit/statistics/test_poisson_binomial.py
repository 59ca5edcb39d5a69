"""Tails of sums of unlike events."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.poisson_binomial import poisson_binomial_tail


def test_equal_events_are_binomial_far_into_the_tail():
    """Down to 1e-60, relatively."""
    for least in (0, 1, 5, 30):
        expected = stats.binom.sf(least - 1, 40, 0.01)
        assert poisson_binomial_tail(np.full(40, 0.01), least) == pytest.approx(expected, rel=1e-9)


def test_unlike_events_by_enumeration():
    """All outcomes of six."""
    probs = np.array([0.1, 0.9, 0.5, 0.0, 1.0, 0.3])
    outcomes = np.array(np.meshgrid(*[[0, 1]] * 6)).reshape(6, -1).T
    weights = np.where(outcomes, probs, 1 - probs).prod(1)
    for least in range(8):
        expected = weights[outcomes.sum(1) >= least].sum()
        assert poisson_binomial_tail(probs, least) == pytest.approx(expected)


def test_a_probability_lies_in_the_unit_interval():
    """NaN doesn't."""
    with pytest.raises(InternalError):
        poisson_binomial_tail(np.array([0.5, np.nan]), 1)
