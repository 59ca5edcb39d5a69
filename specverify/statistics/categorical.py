"""Do these counts follow this law? The likelihood-ratio chi-square (G) with a p-value that holds for every n.

Note [Honest tails]: the chi-square limit law can't be used at 1e-6. Over 40 cells that expect 5 it understates
Pearson's tail 4-fold at 1e-7; for 150 draws of a coin of probability 0.1, 87-fold between 1e-9 and 1e-5; there G, too,
errs 8-fold. So the p-value is a theorem instead of a limit: Markov's inequality on exp(s G), P(G >= g) <= E[exp(s G)]
exp(-s g), smallest over a fixed grid of s. The expectation is exact: under the multinomial law the counts are
independent Poisson counts given their sum, so it is one coefficient of a product of per-cell series, read off by FFT.
The price is a factor of 20 to 30 in the p-value (up to 130 with two cells), that is 10 to 25 % more samples; the gain
is that no pooling threshold stands between the number and the truth. `tests/meta/test_statistics_calibration.py`
compares it with exact enumeration down to 1e-12, and with importance sampling at 1e-5, 1e-7 and 1e-9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from scipy import optimize, special, stats

from specverify.errors import InternalError
from specverify.statistics.design import fewest_samples, require_rate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["ChiSquare", "chi_square", "pool", "samples_needed_tv", "smallest_detectable_tv"]

_LEAST_EXPECTED = 5.0
"""Cells below this expectation are pooled: for power (the study's omnibus choice), not for validity."""
_MOST_GROUPS = 256
"""With many samples cells are pooled to n / 256 instead: more degrees of freedom would cost power and time."""
_TILTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.48)
"""The grid of s; the best is (1 - d/g) / 2 in the limit, for d degrees of freedom: always below 1/2."""
_NEGLIGIBLE_NATS = 45.0
"""Terms smaller than the largest by this many nats are left out of a cell's series."""
_FFT_ROUNDING = 1e-10
"""More than what rounding can take from the FFT's probability: added, so that the bound stays one."""


@dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """Outcome of a likelihood-ratio chi-square test."""

    statistic: float
    """G = 2 Σ O ln(O / E) over the pooled cells; infinite where an impossible cell was observed."""
    degrees_of_freedom: int
    p_value: float
    """Never below the true tail probability (Note [Honest tails]); 20 to 30 times it far out, and 1 near the middle."""
    num_samples: int


def chi_square(observed_counts: Int[np.ndarray, " cells"], expected_probs: Float[np.ndarray, " cells"]) -> ChiSquare:
    """Test counts against a law that was fixed before; a single count in a cell of probability 0 fails at once.

    Raises `InternalError` where the probabilities aren't a law, or the shapes differ.

    >>> chi_square(np.array([50, 50]), np.array([0.5, 0.5])).p_value
    1.0
    """
    probs = _law(expected_probs)
    if observed_counts.shape != probs.shape or (observed_counts < 0).any():
        msg = f"{observed_counts.shape} counts, some perhaps negative, don't go with {probs.shape} probabilities"
        raise InternalError(msg)
    num_samples = int(observed_counts.sum())
    cells = pool(probs, num_samples)
    degrees = int(cells.max())
    if observed_counts[probs == 0].any():
        return ChiSquare(statistic=math.inf, degrees_of_freedom=degrees, p_value=0.0, num_samples=num_samples)
    possible = probs > 0
    observed = np.bincount(cells[possible], weights=observed_counts[possible])
    expected = np.bincount(cells[possible], weights=num_samples * probs[possible])
    statistic = max(0.0, 2 * float(special.rel_entr(observed, expected).sum()))
    return ChiSquare(
        statistic=statistic,
        degrees_of_freedom=degrees,
        p_value=_tail_bound(statistic, degrees, expected, num_samples) if statistic > degrees > 0 else 1.0,
        num_samples=num_samples,
    )


def _law(probs: Float[np.ndarray, " cells"]) -> Float[np.ndarray, " cells"]:
    """The probabilities in float64, their sum mended where it is 1 but for rounding."""
    law = np.asarray(probs, dtype=np.float64)
    total = float(law.sum())
    if not abs(total - 1) < 1e-4 or (law < 0).any():
        msg = f"expected probabilities must be at least 0 and sum to 1, not {total}"
        raise InternalError(msg)
    return law / total


def pool(expected_probs: Float[np.ndarray, " cells"], num_samples: int) -> Int[np.ndarray, " cells"]:
    """The pooled cell of each cell, from 0; -1 for cells of probability 0.

    Likely cells stay alone. Those that expect less than 5, or less than n / 256, are taken from the likeliest to the
    rarest and packed into groups that expect about that, so that a missing or a swollen tail stays visible. It looks at
    the law only, never at the counts.
    """
    order = np.argsort(-expected_probs, kind="stable")
    expected = num_samples * expected_probs[order]
    least = max(_LEAST_EXPECTED, num_samples / _MOST_GROUPS)
    num_alone = int((expected >= least).sum())
    begin = np.cumsum(expected[num_alone:]) - expected[num_alone:]  # what the cells before it expect
    num_groups = max(1, int(expected[num_alone:].sum() / least))
    groups = np.minimum(begin // least, num_groups - 1).astype(np.int64)
    filled = np.unique(groups, return_inverse=True)[1]  # a group may be jumped over
    cells = np.empty(len(order), dtype=np.int64)
    cells[order] = np.concatenate((np.arange(num_alone), num_alone + filled))
    return np.where(expected_probs > 0, cells, -1)


def _tail_bound(statistic: float, degrees: int, expected: Float[np.ndarray, " cells"], num_samples: int) -> float:
    """The least of Markov's bounds on P(G >= statistic); it falls in `statistic`, as each of them does.

    The log of the bound is convex in the tilt, so walking downhill from the best tilt of the limit finds the least.
    """

    @cache
    def log_bound(at: int) -> float:
        return _log_moment(_TILTS[at], expected, num_samples) - _TILTS[at] * statistic

    at = int(np.abs(np.array(_TILTS) - (1 - degrees / statistic) / 2).argmin())
    while at + 1 < len(_TILTS) and log_bound(at + 1) < log_bound(at):
        at += 1
    while at > 0 and log_bound(at - 1) < log_bound(at):
        at -= 1
    return math.exp(min(0.0, log_bound(at)))


def _log_moment(tilt: float, expected: Float[np.ndarray, " cells"], num_samples: int) -> float:
    """Log E[exp(tilt · G)] under the multinomial law.

    Poisson counts O of means E have the multinomial law given ΣO = n, and there G = Σ 2 (O ln(O/E) - O + E). So it is
    the probability of ΣO = n under the tilted Poisson laws, times their normalisers, over Poisson(n; n). The FFT is
    cyclic: what it wraps around only adds to the bound.
    """
    length = 2 ** math.ceil(math.log2(64 + 20 * math.sqrt(num_samples / (1 - 2 * tilt))))
    log_total = 0.0
    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    means, multiplicity = np.unique(expected, return_counts=True)
    for mean, times in zip(means.tolist(), multiplicity.tolist(), strict=True):
        counts, log_weights = _tilted_poisson(mean, tilt, num_samples)
        log_cell = float(special.logsumexp(log_weights))
        folded = np.bincount(counts % length, weights=np.exp(log_weights - log_cell), minlength=length)
        spectrum *= np.fft.rfft(folded) ** times
        log_total += times * log_cell
    probability = max(0.0, float(np.fft.irfft(spectrum, length)[num_samples % length])) + _FFT_ROUNDING
    log_poisson = num_samples * math.log(num_samples) - num_samples - math.lgamma(num_samples + 1)
    return log_total + math.log(probability) - log_poisson


def _tilted_poisson(
    mean: float, tilt: float, num_samples: int
) -> tuple[Int[np.ndarray, " counts"], Float[np.ndarray, " counts"]]:
    """Counts and the logs of Poisson(count; mean) · exp(tilt · 2 (count ln(count/mean) - count + mean)).

    The deviance is at least d² / (mean + d/3) at distance d: the window ends where that makes a term negligible.
    """
    spread = 2 * _NEGLIGIBLE_NATS / (1 - 2 * tilt)
    reach = (spread / 3 + math.sqrt(spread**2 / 9 + 4 * spread * mean)) / 2
    counts = np.arange(max(0, math.floor(mean - reach)), min(num_samples, math.ceil(mean + reach)) + 1)
    deviance = 2 * (special.rel_entr(counts, mean) - counts + mean)
    log_poisson = counts * math.log(mean) - mean - special.gammaln(counts + 1)
    return counts, log_poisson + tilt * deviance


def _critical_statistic(degrees: int, rate: float) -> float:
    """Where Markov's bound in the limit, (e x / d)^(d/2) exp(-x/2), falls to `rate`."""

    def log_excess(ratio: float) -> float:
        return degrees / 2 * (1 + math.log(ratio) - ratio) - math.log(rate)

    high = 2.0
    while log_excess(high) > 0:
        high *= 2
    return degrees * float(optimize.brentq(log_excess, 1.0, high))


def _noncentrality(degrees: int, *, false_fail_rate: float, false_pass_rate: float) -> float:
    """The noncentrality at which a chi-square statistic stays below its critical value with `false_pass_rate`."""
    critical = _critical_statistic(degrees, false_fail_rate)

    def excess(noncentrality: float) -> float:
        return float(stats.ncx2.cdf(critical, degrees, noncentrality)) - false_pass_rate

    if stats.chi2.cdf(critical, degrees) <= false_pass_rate:
        return 0.0
    high = critical
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 1e-9, high))


def smallest_detectable_tv(
    expected_probs: Float[np.ndarray, " cells"], num_samples: int, *, false_fail_rate: float, false_pass_rate: float
) -> float:
    """The TV distance (between pooled cells) that `chi_square` reliably sees, in the direction that is hardest to see.

    G is noncentral chi-square with noncentrality n Σ (r - p)² / p, which by Cauchy–Schwarz is at least 4 n TV²: the
    direction in which |r - p| is proportional to p is the hardest. Other deviations of the same size are seen earlier.
    """
    require_rate(false_fail_rate, false_pass_rate)
    degrees = int(pool(_law(expected_probs), num_samples).max()) if num_samples else 0
    if degrees == 0:
        return 1.0
    needed = _noncentrality(degrees, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate)
    return min(1.0, math.sqrt(needed / (4 * num_samples)))


def samples_needed_tv(
    expected_probs: Float[np.ndarray, " cells"], distance: float, *, false_fail_rate: float, false_pass_rate: float
) -> int:
    """The fewest samples at which `smallest_detectable_tv` is at most `distance`."""
    return fewest_samples(
        lambda n: (
            smallest_detectable_tv(expected_probs, n, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate)
            <= distance
        )
    )
