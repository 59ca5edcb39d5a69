"""How often a healthy pair may be failed by chance, and how that is shared (Note [Error budget] in `judge`).

Half of the run's `false_fail_rate` goes to its e-processes, evenly: of m, each fails from e = m / rate. The other half
goes to all p-values together, by Holm's procedure. Both hold under any dependence between the tests [Holm1979,
Ville1939].

Note [Reckoned with]: a check that ends early on proof, or says what it could have seen, must know its share before the
run's tests are counted. So it reckons with the most tests that any run has, `most_p_values` and `MOST_E_PROCESSES`: those
of `qualify ENGINE`, which holds most cells with and without speculation. A share of fewer tests is larger, so nothing that
ended a check falls short of it. A run that has more after all is refused (`require_reckoned`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import InternalError
from specverify.statistics.design import require_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_E_PROCESSES", "HolmLevel", "e_threshold", "holm", "most_p_values", "require_reckoned"]

MOST_E_PROCESSES = 32
"""No run has more (Note [Reckoned with])."""
_OTHER_P_VALUES = 36
"""Of a run, beside those of first tokens."""


@dataclass(frozen=True)
class HolmLevel:
    """What Holm's procedure allows one test; `rejected` is `p_value <= allowed`."""

    allowed: float
    rejected: bool


def holm(p_values: Sequence[float], rate: float) -> tuple[HolmLevel, ...]:
    """Each test's level and whether it is rejected, in the order given; at most `rate` for any false rejection in all.

    The smallest of m p-values is held to rate/m, the next to rate/(m-1), and so on; the first that passes fixes the
    level of all that remain. Raises `InternalError` for a p-value outside [0, 1].

    >>> [level.rejected for level in holm([0.04, 0.001, 0.02], 0.05)]
    [True, True, True]
    """
    require_rate(rate)
    values = np.asarray(p_values, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        msg = f"a p-value must lie in [0, 1]: {list(p_values)}"
        raise InternalError(msg)
    order = np.argsort(values, kind="stable")
    allowed = rate / (len(values) - np.arange(len(values)))
    passed = values[order] > allowed
    if passed.any():
        allowed[passed.argmax() :] = allowed[passed.argmax()]
    by_test = np.empty(len(values))
    by_test[order] = allowed
    return tuple(HolmLevel(float(level), bool(value <= level)) for level, value in zip(by_test, values, strict=True))


def e_threshold(rate: float, num_e_processes: int) -> float:
    """log10 of the e-value from which each of so many e-processes fails.

    >>> round(e_threshold(1e-6, 1), 12)
    6.0
    """
    require_rate(rate)
    if num_e_processes < 1:
        msg = "there is no e-process to share the rate"
        raise InternalError(msg)
    return math.log10(num_e_processes) - math.log10(rate)


def most_p_values(first_token_prompts: int) -> int:
    """No run has more: one of each such prompt, with and without speculation, and a fixed number of others.

    >>> most_p_values(4)
    44
    """
    return _OTHER_P_VALUES + 2 * first_token_prompts


def require_reckoned(num_e_processes: int, num_p_values: int, first_token_prompts: int) -> None:
    """Raise `InternalError` for a run of more tests than its checks reckoned with."""
    most = MOST_E_PROCESSES, most_p_values(first_token_prompts)
    if num_e_processes > most[0] or num_p_values > most[1]:
        msg = (
            f"the run has {num_e_processes} e-processes and {num_p_values} p-values, but its checks reckoned with {most[0]} "
            f"and {most[1]}, so what they say they could have seen is wrong; raise the numbers in statistics/budget.py"
        )
        raise InternalError(msg)
