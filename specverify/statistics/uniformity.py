"""Are these values uniform on [0, 1]? Kolmogorov–Smirnov with its exact null, and chi-square over equal bins.

The values are PIT values: exactly uniform and independent if and only if each token follows the target's law, whatever
the vocabulary, the prompts and the lengths (Note [PIT] in `scoring`). So nothing here is an approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.categorical import ChiSquare, chi_square, samples_needed_tv, smallest_detectable_tv
from specverify.statistics.design import fewest_samples, require_rate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "KolmogorovSmirnov",
    "bin_numbers",
    "chi_square_uniform",
    "kolmogorov_distance_bound",
    "kolmogorov_smirnov",
    "samples_needed_kolmogorov",
    "samples_needed_uniform_tv",
    "smallest_detectable_kolmogorov",
    "smallest_detectable_uniform_tv",
]


@dataclass(frozen=True, kw_only=True)
class KolmogorovSmirnov:
    """Outcome of a two-sided Kolmogorov–Smirnov test."""

    statistic: float
    """The greatest distance of the empirical CDF from the diagonal."""
    p_value: float
    num_samples: int


def _require_unit(values: Float[np.ndarray, " n"]) -> None:
    outside = ~((values >= 0) & (values <= 1))  # true of NaN, too
    if outside.any():
        where = int(outside.argmax())
        msg = f"a PIT value must lie in [0, 1], but value {where} is {values[where]}"
        raise InternalError(msg)


def bin_numbers(values: Float[np.ndarray, " n"], bins: int) -> Int[np.ndarray, " n"]:
    """The number of the equal bin of [0, 1] in which each value lies; 1 belongs to the last. Raises `InternalError`."""
    _require_unit(values)
    return np.minimum((values * bins).astype(np.int64), bins - 1)


def kolmogorov_smirnov(values: Float[np.ndarray, " n"]) -> KolmogorovSmirnov:
    """Two-sided test against U(0, 1); the null law is exact (`scipy.stats.kstwo`), so p-values of 1e-9 mean 1e-9.

    Raises `InternalError` for a value outside [0, 1].

    >>> kolmogorov_smirnov(np.array([0.5])).statistic
    0.5
    """
    _require_unit(values)
    if not len(values):
        return KolmogorovSmirnov(statistic=0.0, p_value=1.0, num_samples=0)
    outcome = stats.ks_1samp(values, stats.uniform.cdf, method="exact")
    return KolmogorovSmirnov(statistic=float(outcome.statistic), p_value=float(outcome.pvalue), num_samples=len(values))


def smallest_detectable_kolmogorov(num_samples: int, *, false_fail_rate: float, false_pass_rate: float) -> float:
    """The Kolmogorov distance from uniform that KS reliably sees: its critical value plus one Hoeffding half width.

    Let the true CDF F be furthest from the diagonal at x, by D. The statistic is at least D minus the deviation of the
    empirical CDF from F *at that x*, a binomial share, which exceeds h with probability at most exp(-2 n h²) on one
    side. So D >= critical value + sqrt(ln(1 / false_pass_rate) / 2n) is enough. In the study's terms n ≈ (2.1 / D)² at
    1e-3.
    """
    require_rate(false_fail_rate, false_pass_rate)
    if num_samples < 1:
        return 1.0
    critical = float(stats.kstwo.isf(false_fail_rate, num_samples))
    return min(1.0, critical + math.sqrt(-math.log(false_pass_rate) / (2 * num_samples)))


def samples_needed_kolmogorov(distance: float, *, false_fail_rate: float, false_pass_rate: float) -> int:
    """The fewest samples at which `smallest_detectable_kolmogorov` is at most `distance`."""
    return fewest_samples(
        lambda n: (
            smallest_detectable_kolmogorov(n, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate)
            <= distance
        )
    )


def kolmogorov_distance_bound(statistic: float, num_samples: int, *, false_pass_rate: float) -> float:
    """Statement C: the true distance is at most this, but for a chance of `false_pass_rate` [Massart1990].

    D <= D_n + sqrt(ln(2 / rate) / 2n). Tokens each have their own law: it bounds the distance of the *mean* law from
    uniform, and doesn't exclude deviations that cancel across positions.
    """
    require_rate(false_pass_rate)
    if num_samples < 1:
        return 1.0
    return min(1.0, statistic + math.sqrt(math.log(2 / false_pass_rate) / (2 * num_samples)))


def chi_square_uniform(values: Float[np.ndarray, " n"], bins: int = 16) -> ChiSquare:
    """Likelihood-ratio chi-square over equal bins: sees humps that KS, a test of shifts, is slow to see."""
    observed = np.bincount(bin_numbers(values, bins), minlength=bins)
    return chi_square(observed, np.full(bins, 1 / bins))


def smallest_detectable_uniform_tv(
    num_samples: int, *, false_fail_rate: float, false_pass_rate: float, bins: int = 16
) -> float:
    """The TV distance between bins that `chi_square_uniform` reliably sees, in the direction that is hardest to see."""
    uniform = np.full(bins, 1 / bins)
    return smallest_detectable_tv(
        uniform, num_samples, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate
    )


def samples_needed_uniform_tv(
    distance: float, *, false_fail_rate: float, false_pass_rate: float, bins: int = 16
) -> int:
    """The fewest samples at which `smallest_detectable_uniform_tv` is at most `distance`."""
    uniform = np.full(bins, 1 / bins)
    return samples_needed_tv(uniform, distance, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate)
