"""Do the tests alarm as rarely as they promise, on this machine and with this pair? Many runs without a fault.

A promise of one false alarm in a million can't be seen by counting. But every test's p-value promises to lie below 0.1 in at
most a tenth of the runs, and an e-value to reach 10 in at most a tenth, and these can. A test that breaks such a promise
breaks the small ones, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.certify import Transcripts, chosen, run_check
from specverify.checks.check import derived_seed
from specverify.judge import judge
from specverify.records import Verdict, worst
from specverify.statistics.interval import Interval, clopper_pearson
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specverify.plan import Plan
    from specverify.records import CheckResult, StatisticalTest
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["LEVELS", "Calibration", "Promise", "calibrate", "promises"]

LEVELS = (0.1, 0.01)
"""False-alarm rates at which alarms are counted."""
_MOST_EXCESS = 10
"""A promise passes if a test that alarms so many times as often would have been found out."""
_CONFIDENCE = 1 - 1e-4
"""Of each interval: among a hundred promises none is called broken by chance, in most runs."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One test at one rate."""

    check_id: str
    test: str
    promised: float
    num_runs: int
    num_alarms: int
    observed: Interval

    @property
    def seen_from(self) -> float:
        """The share of alarms from which the promise would be called broken; infinite where no share would."""
        shares = (alarms / self.num_runs for alarms in range(self.num_runs + 1) if self._broken_by(alarms))
        return next(shares, math.inf)

    @property
    def verdict(self) -> Verdict:
        """FAIL where even the low end of what was observed is above what was promised; few runs are INCONCLUSIVE."""
        if self._broken_by(self.num_alarms):
            return Verdict.FAIL
        return Verdict.PASS if self.seen_from <= _MOST_EXCESS * self.promised else Verdict.INCONCLUSIVE

    def _broken_by(self, alarms: int) -> bool:
        return clopper_pearson(alarms, self.num_runs, confidence=_CONFIDENCE).low > self.promised


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What came of runs without a fault."""

    num_runs: int
    num_failed: int
    """Runs that the judge failed, at the plan's own rate: each is one too many."""
    promises: tuple[Promise, ...]

    @property
    def verdict(self) -> Verdict:
        """FAIL where a run was failed or a promise broken, INCONCLUSIVE where the runs were too few to tell."""
        return Verdict.FAIL if self.num_failed else worst(promise.verdict for promise in self.promises)


def calibrate(subject: Subject, plan: Plan, *, runs: int, watch: Watch | None = None) -> Calibration:
    """Run the plan's checks `runs` times on a subject without a fault, each time with a seed of its own."""
    watch = Silent() if watch is None else watch
    watch.stage("calibrate", runs)
    results: list[CheckResult] = []
    num_failed = 0
    for number in range(runs):
        again = dataclasses.replace(plan, seed=derived_seed(plan.seed, "calibrate", str(number)))
        shared = Transcripts(subject)
        results_now = [run_check(check, subject, again, transcripts=shared) for check in chosen(plan)]
        judged, _ = judge(results_now, plan.false_fail_rate)
        num_failed += any(result.verdict is Verdict.FAIL for result in judged)
        results += judged
        watch.advance()
    return Calibration(num_runs=runs, num_failed=num_failed, promises=tuple(promises(results)))


def promises(results: Sequence[CheckResult]) -> Iterable[Promise]:
    """Alarms of each test, counted over all its runs; tests that differ in their prompt alone count together."""
    met: dict[tuple[str, str], list[StatisticalTest]] = defaultdict(list)
    for result in results:
        for test in result.tests:
            met[result.id, _family(test)].append(test)
    for (check_id, family), tests in met.items():
        for level in LEVELS:
            alarms = sum(_alarms(test, level) for test in tests)
            yield Promise(
                check_id=check_id,
                test=family,
                promised=level,
                num_runs=len(tests),
                num_alarms=alarms,
                observed=clopper_pearson(alarms, len(tests), confidence=_CONFIDENCE),
            )


def _family(test: StatisticalTest) -> str:
    """`first token after austen-01, chi-square` and its siblings are one test; a suspected fault is no other test."""
    name = re.sub(r" after [^,]*,", ",", test.name)
    return re.sub(r", likeliest: .*", "", name)


def _alarms(test: StatisticalTest, level: float) -> bool:
    if test.log10_e is not None:
        return 10**test.log10_e >= 1 / level
    return test.p_value is not None and test.p_value <= level
