"""Do the tests alarm as rarely as they promise, on this machine and with this pair? Many runs without a fault.

A promise of one false alarm in a million can't be seen by counting. But every test's p-value promises to lie below 0.1 in at
most a tenth of the runs, and an e-value to reach 10 in at most a tenth, and these can. A test that breaks such a promise
breaks the small ones, too.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from specverify.certify import Transcripts, chosen, run_check
from specverify.checks.check import derived_seed
from specverify.judge import judge
from specverify.records import Verdict, worst
from specverify.statistics.interval import Interval, clopper_pearson
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specverify.plan import Plan
    from specverify.records import CheckResult, StatisticalTest
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["LEVELS", "Alarms", "Calibration", "Counted", "Promise", "calibrate", "promises"]

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


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """One test at one rate, so far."""

    check_id: str
    test: str
    promised: float
    num_runs: int
    num_alarms: int


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a calibration has so far."""

    key: str = ""
    """Of the measurement; another's counts are never taken over."""
    num_runs: int = 0
    num_failed: int = 0
    alarms: tuple[Alarms, ...] = ()

    def with_run(self, results: Sequence[CheckResult]) -> Counted:
        """One run more, of these judged results."""
        return Counted(
            key=self.key,
            num_runs=self.num_runs + 1,
            num_failed=self.num_failed + any(result.verdict is Verdict.FAIL for result in results),
            alarms=tuple(_counted(results, self.alarms)),
        )


def calibrate(
    subject: Subject,
    plan: Plan,
    *,
    runs: int,
    counted: Counted | None = None,
    keep: Callable[[Counted], None] = lambda _: None,
    watch: Watch | None = None,
) -> Calibration:
    """Run the plan's checks on a subject without a fault, each time with a seed of its own, until `runs` are counted.

    Goes on from what was `counted` before; `keep` gets the counts after each run.
    """
    watch = Silent() if watch is None else watch
    watch.stage("calibrate", runs)
    counted = Counted() if counted is None else counted
    watch.advance(min(counted.num_runs, runs))
    for number in range(counted.num_runs, runs):
        again = replace(plan, seed=derived_seed(plan.seed, "calibrate", str(number)))
        shared = Transcripts(subject)
        results_now = [run_check(check, subject, again, transcripts=shared) for check in chosen(plan)]
        judged, _ = judge(results_now, plan.false_fail_rate)
        counted = counted.with_run(judged)
        keep(counted)
        watch.advance()
    return Calibration(
        num_runs=counted.num_runs, num_failed=counted.num_failed, promises=tuple(promises(counted.alarms))
    )


def promises(alarms: Iterable[Alarms]) -> Iterable[Promise]:
    """What was counted, with its interval."""
    for one in alarms:
        observed = clopper_pearson(one.num_alarms, one.num_runs, confidence=_CONFIDENCE)
        yield Promise(**asdict(one), observed=observed)


def _counted(results: Sequence[CheckResult], before: Sequence[Alarms]) -> Iterable[Alarms]:
    """Alarms of each test, added to those `before`; tests that differ in their prompt alone count together."""
    met = {(one.check_id, one.test, one.promised): one for one in before}
    for result in results:
        for test, level in product(result.tests, LEVELS):
            its = result.id, _family(test), level
            so_far = met.get(its) or Alarms(check_id=its[0], test=its[1], promised=level, num_runs=0, num_alarms=0)
            alarm = _alarms(test, level)
            met[its] = replace(so_far, num_runs=so_far.num_runs + 1, num_alarms=so_far.num_alarms + alarm)
    return met.values()


def _family(test: StatisticalTest) -> str:
    """`first token after austen-01, chi-square` and its siblings are one test; a suspected fault is no other test."""
    name = re.sub(r" after [^,]*,", ",", test.name)
    return re.sub(r", likeliest: .*", "", name)


def _alarms(test: StatisticalTest, level: float) -> bool:
    if test.log10_e is not None:
        return 10**test.log10_e >= 1 / level
    return test.p_value is not None and test.p_value <= level
