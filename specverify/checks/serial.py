"""Evidence that a token knows the one before it: the PIT values of a healthy stream are independent of each other.

Note [Serial]: a uniform that is used twice in a row leaves each token with the right law, averaged over contexts, so no
histogram of single values sees it. But given the past a value u' is uniform, so u' - u (mod 1) is, too, and independent of
every earlier difference: under the claim the differences are i.i.d. uniform, exactly, and a reused uniform heaps them
around 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.evidence import least_level
from specverify.records import StatisticalTest
from specverify.statistics.uniformity import chi_square_uniform, smallest_detectable_uniform_tv

if TYPE_CHECKING:
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces

__all__ = ["serial_test"]


def serial_test(scored: ScoredTraces, plan: Plan, *, name: str) -> tuple[StatisticalTest, ...]:
    """Chi-square of the differences of consecutive PIT values by id, the order in which tokens are drawn."""
    if not len(scored["pit_id"]):
        return ()
    follows = np.diff(scored["trace"]) == 0
    follows &= np.diff(scored["position"]) == 1
    differences = np.mod(np.diff(scored["pit_id"])[follows], 1)
    if not len(differences):
        return ()
    outcome = chi_square_uniform(differences)
    detectable = smallest_detectable_uniform_tv(
        len(differences), false_fail_rate=least_level(plan), false_pass_rate=plan.false_pass_rate
    )
    return (
        StatisticalTest(
            name=f"{name} chi-square, consecutive tokens",
            statistic=outcome.statistic,
            p_value=outcome.p_value,
            allowed=float("nan"),
            failed=False,
            num_samples=len(differences),
            smallest_detectable=detectable,
        ),
    )
