"""Intervals: shares (exact), means of tokens that come in prompts (cluster-t), ratios of paired timings (bootstrap)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

from specverify.errors import InternalError
from specverify.statistics.design import require_rate

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

__all__ = [
    "Interval",
    "clopper_pearson",
    "cluster_interval",
    "mixture_share_bound",
    "paired_ratio_interval",
    "zero_failures_bound",
]

_RESAMPLES = 4_000


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it; infinite ends say that the data can't bound it."""

    estimate: float
    low: float
    high: float
    confidence: float


def cluster_interval(
    values: Float[np.ndarray, " n"], clusters: Shaped[np.ndarray, " n"], *, confidence: float = 0.95
) -> Interval:
    """The mean of all values, with a t interval whose unit is the cluster (the prompt), not the value.

    Tokens of one prompt resemble each other: in the study an interval by token covers 17-35 % instead of 95 %. The mean
    is the ratio Σ totals / Σ sizes, so prompts may differ in length; its variance is that of the clusters' residuals,
    with clusters - 1 degrees of freedom. Fewer than two clusters say nothing of their spread: the ends are infinite. No
    values: the estimate is NaN. Raises `InternalError` for a value that isn't finite.
    """
    require_rate(confidence)
    if values.shape != clusters.shape or not np.isfinite(values).all():
        msg = "values must be finite, and each must have a cluster"
        raise InternalError(msg)
    if not len(values):
        return Interval(math.nan, -math.inf, math.inf, confidence)
    mean = float(values.mean())
    _, number = np.unique(clusters, return_inverse=True)
    residuals = np.bincount(number, weights=values - mean)
    count = len(residuals)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, confidence)
    error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / len(values)
    half = float(stats.t.ppf((1 + confidence) / 2, count - 1)) * error
    return Interval(mean, mean - half, mean + half, confidence)


def clopper_pearson(num_hits: int, num_samples: int, *, confidence: float = 0.95) -> Interval:
    """Exact two-sided interval of a share; each side errs with probability at most (1 - confidence) / 2.

    >>> clopper_pearson(0, 10).low
    0.0
    """
    require_rate(confidence)
    if not 0 <= num_hits <= num_samples:
        msg = f"{num_hits} hits of {num_samples} samples"
        raise InternalError(msg)
    tail = (1 - confidence) / 2
    misses = num_samples - num_hits
    low = float(stats.beta.ppf(tail, num_hits, misses + 1)) if num_hits else 0.0
    high = float(stats.beta.isf(tail, num_hits + 1, misses)) if misses else 1.0
    return Interval(num_hits / num_samples if num_samples else math.nan, low, high, confidence)


def zero_failures_bound(num_samples: int, rate: float) -> float:
    """Statement A: after no mismatch in n coupled draws, TV is at most 1 - rate^(1/n), but for a chance of `rate`.

    A larger share would have shown itself in n draws with probability over 1 - rate, and for any coupling TV is at most
    the probability of a mismatch. About ln(1/rate) / n: it falls as 1/n, at any vocabulary.

    >>> round(zero_failures_bound(13_809, 1e-6), 6)
    0.001
    """
    require_rate(rate)
    return -math.expm1(math.log(rate) / num_samples) if num_samples else 1.0


def mixture_share_bound(
    hits: Float[np.ndarray, " n"],
    expected: Float[np.ndarray, " n"],
    lifts: Float[np.ndarray, " n"],
    *,
    false_pass_rate: float,
) -> float:
    """Statement D: the largest share ε of a second law that the stream allows, but for a chance of `false_pass_rate`.

    If tokens come from (1 - ε) p + ε q, the ids A = {q > p} are hit with probability p(A) + ε TV(p, q): `expected` is
    p(A), `lifts` TV(p, q). So ε is about Σ (hit - p(A)) / Σ TV, and by Azuma–Hoeffding [Hoeffding1963] at most
    sqrt(n ln(1 / rate) / 2) / Σ TV more. In [0, 1]; 1 where the laws never differ, since then nothing can be seen.
    """
    require_rate(false_pass_rate)
    total = float(lifts.sum())
    if total <= 0:
        return 1.0
    half_width = math.sqrt(-math.log(false_pass_rate) * len(hits) / 2)
    return min(1.0, max(0.0, (float((hits - expected).sum()) + half_width) / total))


def paired_ratio_interval(
    numerators: Float[np.ndarray, " pairs"],
    denominators: Float[np.ndarray, " pairs"],
    *,
    seed: int,
    confidence: float = 0.95,
    of: Literal["total", "median"] = "total",
) -> Interval:
    """The ratio of totals (or medians) of interleaved pairs, with a bootstrap interval that resamples whole pairs.

    A slow minute slows both halves of a pair, so pairs are kept together. Percentile bootstrap, deterministic by
    `seed`. Fewer than two pairs give infinite ends. Raises `InternalError` for a time that isn't positive.
    """
    require_rate(confidence)
    if numerators.shape != denominators.shape or not (np.minimum(numerators, denominators) > 0).all():
        msg = "times must come in pairs, and must be positive"
        raise InternalError(msg)
    summary = np.sum if of == "total" else np.median

    def ratio(above: Float[np.ndarray, ...], below: Float[np.ndarray, ...], axis: int = -1) -> Float[np.ndarray, ...]:
        return np.asarray(summary(above, axis=axis) / summary(below, axis=axis))

    if len(numerators) < 2:
        estimate = float(ratio(numerators, denominators)) if len(numerators) else math.nan
        return Interval(estimate, -math.inf, math.inf, confidence)
    interval = stats.bootstrap(
        (numerators, denominators),
        ratio,
        paired=True,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    estimate = float(ratio(numerators, denominators))
    return Interval(estimate, float(interval.low), float(interval.high), confidence)
