"""The judge: holds every statistical test of a run against one error budget. Pure.

Note [Error budget]: a healthy pair may be failed by chance in at most `false_fail_rate` of the runs (1e-6). Half goes to
the e-processes, shared evenly; the other half to all p-values together, by Holm's procedure. Findings that need no
statistics (a token the target can't emit, a wrong greedy token) spend nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from specverify.errors import InternalError
from specverify.records import ErrorBudget, StatisticalTest, Verdict
from specverify.statistics.budget import e_threshold, holm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.records import CheckResult

__all__ = ["NEEDED", "headline", "judge"]

NEEDED = ("greedy", "lossless")
"""Checks without which no pair is let out."""
_ABOUT_THE_PAIR = {"compatibility", "cost"}
"""Checks that no fault of a decoder can fail."""


def judge(
    results: Sequence[CheckResult], false_fail_rate: float, *, least_e_processes: int = 0, least_p_values: int = 0
) -> tuple[tuple[CheckResult, ...], ErrorBudget]:
    """Every test with what it was allowed and whether it failed, and every verdict that follows.

    Where more tests are to come, `least_…` says among how many these share the rate. Raises `InternalError` for a
    p-value outside [0, 1] and for evidence that is not a number.
    """
    tests = [test for result in results for test in result.tests]
    p_values = [test.p_value for test in tests if test.p_value is not None]
    num_e = max(least_e_processes, sum(test.log10_e is not None for test in tests))
    p_values += [1.0] * (least_p_values - len(p_values))
    if any(test.log10_e is not None and math.isnan(test.log10_e) for test in tests):
        msg = "the log10 of an e-value must be a number or infinite"
        raise InternalError(msg)
    budget = ErrorBudget(
        false_fail_rate=false_fail_rate,
        e_process_rate=false_fail_rate / 2,
        p_value_rate=false_fail_rate / 2,
        num_e_processes=num_e,
        num_p_values=len(p_values),
    )
    least_e = e_threshold(budget.e_process_rate, num_e) if num_e else float("inf")
    levels = iter(holm(p_values, budget.p_value_rate))
    judged = []
    for result in results:
        held = []
        for test in result.tests:
            if test.p_value is not None:
                level = next(levels)
                held.append(replace(test, allowed=level.allowed, failed=level.rejected))
            elif test.log10_e is not None:
                held.append(replace(test, allowed=least_e, failed=test.log10_e >= least_e))
            else:
                held.append(test)
        judged.append(_with_tests(result, tuple(held)))
    return tuple(judged), budget


def _with_tests(result: CheckResult, tests: tuple[StatisticalTest, ...]) -> CheckResult:
    failed = [test for test in tests if test.failed]
    if not failed:
        return replace(result, tests=tests)
    strongest = max(failed, key=_strength)
    said = result.summary if result.verdict is Verdict.FAIL else f"{_sentence(strongest)}; {result.summary}"
    return replace(result, tests=tests, verdict=Verdict.FAIL, summary=said)


def _strength(test: StatisticalTest) -> float:
    """How far beyond its allowance a failed test is, in decades."""
    if test.log10_e is not None:
        return test.log10_e
    return -math.log10(test.p_value) if test.p_value else math.inf


def _sentence(test: StatisticalTest) -> str:
    if test.log10_e is not None:
        return f"{test.name}: evidence 10^{test.log10_e:.1f} to 1 against the claim (fails from 10^{test.allowed:.1f})"
    return f"{test.name}: p = {test.p_value:.1e} (fails below {test.allowed:.1e})"


def headline(results: Sequence[CheckResult], *, fault: str, whole: bool, engine: str = "reference") -> str:
    """May it go out, and if not, why: one sentence. Without the `whole` list of checks nothing may."""
    by_verdict = {verdict: [result.id for result in results if result.verdict is verdict] for verdict in Verdict}
    failed, thin, not_run = (by_verdict[each] for each in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_RUN))
    wrong = [result.id for result in results if result.verdict is Verdict.FAIL and not _is_refusal(result)]
    if fault:
        return _caught(fault, [check_id for check_id in wrong if check_id not in _ABOUT_THE_PAIR], results)
    if wrong:
        return f"Do not roll this out: {', '.join(failed)} failed."
    if failed:
        known = "no check of correctness failed" if whole and not thin else _not_known(thin)
        pays = "speculation does not pay with this draft" if "cost" in failed else "too few drafts are accepted"
        return f"Refused a rollout on {' and '.join(failed)}: {known}, but {pays}."
    if thin:
        return f"Not decided: {', '.join(thin)} could not be settled with these samples."
    if not by_verdict[Verdict.PASS]:
        return "Nothing was checked."
    if not whole or not set(by_verdict[Verdict.PASS]) >= set(NEEDED):
        passed = ", ".join(by_verdict[Verdict.PASS])
        return f"No difference was found by {passed}; only a run of all checks can let the pair out."
    left_out = f" ({', '.join(not_run)} did not run)" if not_run else ""
    pays = "speculation pays" if "cost" in by_verdict[Verdict.PASS] else "whether speculation pays was not measured"
    ran = "specverify's own decoder (your engine was not run)" if engine == "reference" else engine
    return f"This pair may go out: in {ran} no check found a difference from the target alone, and {pays}{left_out}."


def _is_refusal(result: CheckResult) -> bool:
    """Whether a check failed because the pair doesn't pay, not because it is wrong."""
    asked_for_more = result.id == "acceptance" and not any(test.failed for test in result.tests)
    return result.id == "cost" or asked_for_more


def _not_known(thin: Sequence[str]) -> str:
    return f"correctness is not settled ({', '.join(thin)})" if thin else "correctness was not checked in full"


def _caught(fault: str, by: Sequence[str], results: Sequence[CheckResult]) -> str:
    ran = ", ".join(result.id for result in results if result.verdict is not Verdict.NOT_RUN)
    if by:
        return f"The planted fault '{fault}' was caught by {', '.join(by)}."
    return f"The planted fault '{fault}' was NOT caught by the checks that ran ({ran})."
