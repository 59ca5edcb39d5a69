"""The error budget: Holm's levels, and the threshold of e-values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specverify.errors import InternalError
from specverify.statistics.budget import (
    MOST_E_PROCESSES,
    HolmLevel,
    e_threshold,
    holm,
    most_p_values,
    require_reckoned,
)


def test_holm_by_hand() -> None:
    """Four tests at 0.05: 0.005 < 0.0125 and 0.01 < 0.0167 are rejected, 0.03 > 0.025 stops; order is kept."""
    assert holm([0.03, 0.005, 0.04, 0.01], 0.05) == (
        HolmLevel(0.025, rejected=False),
        HolmLevel(0.0125, rejected=True),
        HolmLevel(0.025, rejected=False),
        HolmLevel(pytest.approx(0.05 / 3), rejected=True),
    )


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(1e-9, 0.5))
def test_holm_is_consistent_and_stronger_than_bonferroni(p_values: list[float], rate: float) -> None:
    """Rejected means p <= allowed; whatever Bonferroni rejects Holm rejects; smaller p-values are rejected first."""
    levels = holm(p_values, rate)
    assert len(levels) == len(p_values)
    for p_value, level in zip(p_values, levels, strict=True):
        assert level.rejected == (p_value <= level.allowed)
        assert level.rejected or p_value > rate / len(p_values)
    rejected = [p for p, level in zip(p_values, levels, strict=True) if level.rejected]
    assert max(rejected, default=0) <= min((p for p in p_values if p not in rejected), default=1)


def test_holm_refuses_what_is_no_p_value() -> None:
    """NaN would otherwise pass silently."""
    with pytest.raises(InternalError, match="p-value"):
        holm([0.5, math.nan], 0.05)
    with pytest.raises(InternalError, match="rate"):
        holm([0.5], 0.0)


def test_e_threshold_shares_the_rate_evenly() -> None:
    """Three processes at 5e-7: each fails from e = 6e6."""
    assert e_threshold(5e-7, 3) == pytest.approx(np.log10(6e6))
    with pytest.raises(InternalError, match="no e-process"):
        e_threshold(5e-7, 0)


def test_a_run_of_more_tests_than_its_checks_reckoned_with_is_refused() -> None:
    """Each prompt of first tokens may count twice: with speculation and without."""
    require_reckoned(MOST_E_PROCESSES, most_p_values(4), 4)
    for counts in ((MOST_E_PROCESSES + 1, 0, 4), (0, most_p_values(4) + 1, 4)):
        with pytest.raises(InternalError, match="reckoned with"):
            require_reckoned(*counts)
