"""How likely are so many of some independent events, each with a probability of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import InternalError

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["poisson_binomial_tail"]


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
