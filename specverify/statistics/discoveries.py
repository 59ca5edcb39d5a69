"""Which of many claims are broken: e-values from tests, merged within a claim, and e-BH over all claims.

e-BH holds the false discovery rate under any dependence between the e-values [WangRamdas2022, Thm. 2], so cells of a matrix may share
a target, prompts and seeds. The mean of e-values is an e-value, whatever their dependence, and a p-value becomes one by a
calibrator [VovkWang2021].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import InternalError
from specverify.statistics.design import require_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["calibrated", "e_benjamini_hochberg", "merged"]

_LN10 = math.log(10)


def e_benjamini_hochberg(log10_e: Sequence[float], rate: float) -> tuple[bool, ...]:
    """Whether each of n claims is a discovery: the k largest e-values, for the largest k whose k-th is n / (k rate) or more.

    Of the discoveries at most `rate` are false, on average over runs; if no claim is broken, any is made in at most `rate` of them.

    >>> e_benjamini_hochberg([3.0, 0.1, 2.5], 0.01)
    (True, False, True)
    """
    require_rate(rate)
    values = np.asarray(log10_e, dtype=np.float64)
    if np.isnan(values).any():
        msg = f"evidence must not be NaN: {list(log10_e)}"
        raise InternalError(msg)
    order = np.argsort(-values, kind="stable")
    needed = math.log10(len(values) or 1) - np.log10(np.arange(1, len(values) + 1)) - math.log10(rate)
    enough = np.flatnonzero(values[order] >= needed)
    found = np.zeros(len(values), dtype=bool)
    found[order[: enough[-1] + 1 if len(enough) else 0]] = True
    return tuple(found.tolist())


def calibrated(p_value: float) -> float:
    """log10 of an e-value from a p-value: κ p^(κ-1) averaged over κ in [0, 1].

    >>> round(calibrated(1e-6), 2)
    3.72
    """
    if not 0 <= p_value <= 1:
        msg = f"a p-value must lie in [0, 1], not {p_value}"
        raise InternalError(msg)
    if p_value == 0:
        return math.inf
    if p_value > 1 - 1e-4:  # the limit, where the formula is 0/0
        return math.log10(0.5)
    log = math.log(p_value)
    return (math.log(1 - p_value + p_value * log) - log - 2 * math.log(-log)) / _LN10


def merged(log10_e: Sequence[float]) -> float:
    """log10 of the mean of e-values; 0 of none.

    >>> round(merged([1.0, 2.0]), 3)
    1.74
    """
    if not log10_e:
        return 0.0
    largest = max(log10_e)
    if not math.isfinite(largest):
        return largest
    return largest + math.log10(sum(10 ** (each - largest) for each in log10_e) / len(log10_e))
