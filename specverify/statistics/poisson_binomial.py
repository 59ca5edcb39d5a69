"""How likely are so many of some independent events, each with a probability of its own?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy import special, stats

from specverify.errors import InternalError
from specverify.statistics.design import fewest_samples, require_rate

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["poisson_binomial_tail", "samples_needed_share", "smallest_detectable_share"]


def poisson_binomial_tail(probs: Float[np.ndarray, " n"], least: int) -> float:
    """P(at least `least` of the events), exactly: one event after the other, with "enough" as a state that is never left.

    Every term is positive, so a tail of 1e-30 keeps its digits. Raises `InternalError` outside [0, 1].

    >>> poisson_binomial_tail(np.array([0.5, 0.5]), 2)
    0.25
    """
    if not ((probs >= 0) & (probs <= 1)).all():
        msg = "a probability must lie in [0, 1]"
        raise InternalError(msg)
    if least <= 0:
        return 1.0
    if least > len(probs):
        return 0.0
    counts = np.zeros(least + 1)
    counts[0] = 1.0
    for prob in probs[probs > 0]:
        moved = counts[:-1] * prob
        counts[:-1] -= moved
        counts[1:] += moved
    return float(min(1.0, counts[-1]))


def smallest_detectable_share(
    probs: Float[np.ndarray, " n"], *, false_fail_rate: float, false_pass_rate: float
) -> float:
    """The share of the events that, forced to happen whatever their probability, reliably shows in their number.

    The events with a share forced are reckoned with as equally likely ones of the same mean, whose number spreads further
    [Hoeffding1956]; so what is said is no smaller than what is seen. Infinite where even all of them would not show.
    """
    require_rate(false_fail_rate, false_pass_rate)
    if not len(probs) or float(np.log(probs.clip(1e-300)).sum()) > math.log(false_fail_rate):  # not even all of them
        return math.inf
    least = fewest_samples(lambda count: poisson_binomial_tail(probs, count) <= false_fail_rate)
    return _forced(float(probs.mean()), len(probs), least, false_pass_rate)


def samples_needed_share(share: float, prob: float, *, false_fail_rate: float, false_pass_rate: float) -> int:
    """Events of probability `prob` until that share, forced to happen, reliably shows."""
    require_rate(false_fail_rate, false_pass_rate)

    def enough(number: int) -> bool:
        least = int(stats.binom.isf(false_fail_rate, number, prob)) + 1
        return least <= number and _forced(prob, number, least, false_pass_rate) <= share

    return fewest_samples(enough)


def _forced(prob: float, number: int, least: int, false_pass_rate: float) -> float:
    """The share with which at least `least` of so many happen, but for the rate."""
    rate = float(special.betaincinv(least, number - least + 1, 1 - false_pass_rate))
    return max(0.0, (rate - prob) / (1 - prob))
