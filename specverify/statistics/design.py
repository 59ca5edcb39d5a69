"""What the designs of all checks share: two error rates, and the search for the fewest samples.

Note [Three functions]: a check is three functions. One runs it; one says the smallest effect that it reliably sees with
the samples at hand (`smallest_detectable_…`); one says how many samples an effect needs (`samples_needed_…`). Reliably
means: a healthy subject fails with probability at most `false_fail_rate`, and a subject that deviates by that effect
passes with probability at most `false_pass_rate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fewest_samples", "require_rate"]

_MOST_SAMPLES = 2**50


def require_rate(*rates: float) -> None:
    """Raise `InternalError` unless every rate lies strictly between 0 and 1."""
    for rate in rates:
        if not 0 < rate < 1:
            msg = f"an error rate must lie strictly between 0 and 1, not {rate}"
            raise InternalError(msg)


def fewest_samples(enough: Callable[[int], bool]) -> int:
    """The smallest n at which `enough(n)` holds, for an `enough` that stays true once it is: doubling, then bisection.

    >>> fewest_samples(lambda n: n * n >= 1000)
    32
    """
    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_SAMPLES:
            msg = "no number of samples is enough for this effect"
            raise InternalError(msg)
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
