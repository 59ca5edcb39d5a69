"""The search for the fewest samples, and the rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specverify.errors import InternalError
from specverify.statistics.design import fewest_samples, require_rate


@given(st.integers(1, 10**9))
def test_the_fewest_is_found(threshold: int) -> None:
    """Doubling and bisection find the very first number that is enough."""
    assert fewest_samples(lambda n: n >= threshold) == threshold


def test_an_effect_that_no_number_shows_is_refused() -> None:
    """Instead of searching forever."""
    with pytest.raises(InternalError, match="no number of samples"):
        fewest_samples(lambda _: False)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_a_rate_lies_strictly_between_0_and_1(rate: float) -> None:
    """0 can't be promised and 1 promises nothing."""
    with pytest.raises(InternalError, match="error rate"):
        require_rate(0.5, rate)
