"""Calibration: promises that are kept, promises that are broken, and too few runs to tell."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specverify.calibrate import Calibration, Counted, calibrate
from specverify.calibrate import promises as promised
from specverify.codec import dump, load_as
from specverify.plan import Plan
from specverify.records import CheckResult, StatisticalTest, Verdict
from tests.unit.checks.hashed import subject


def results(p_values: np.ndarray, name: str = "stream KS") -> list[CheckResult]:
    """A run a p-value."""
    bare = CheckResult(id="lossless", claim="", verdict=Verdict.PASS, summary="")
    tests = (
        StatisticalTest(name=name, statistic=0, p_value=float(p), allowed=math.nan, failed=False, num_samples=1)
        for p in p_values
    )
    return [replace(bare, tests=(test,)) for test in tests]


def promises(runs: list[CheckResult]):
    """Of one result a run."""
    counted = Counted()
    for run in runs:
        counted = counted.with_run([run])
    return promised(counted.alarms)


def verdicts(p_values: np.ndarray) -> dict[float, Verdict]:
    """Of each promised rate."""
    return {promise.promised: promise.verdict for promise in promises(results(p_values))}


def test_uniform_p_values_keep_every_promise():
    """And there are runs enough to say so."""
    assert verdicts(np.random.default_rng(0).random(400)) == {0.1: Verdict.PASS, 0.01: Verdict.PASS}


def test_p_values_that_are_too_small_break_one():
    """Squared, they lie below 0.01 in a tenth of the runs."""
    assert verdicts(np.random.default_rng(0).random(400) ** 2) == {0.1: Verdict.FAIL, 0.01: Verdict.FAIL}


def test_few_runs_tell_nothing():
    """Whatever three runs show, a test that alarms ten times too often could have shown it."""
    assert verdicts(np.full(3, 0.5)) == {0.1: Verdict.INCONCLUSIVE, 0.01: Verdict.INCONCLUSIVE}


def test_an_e_value_promises_as_a_p_value_does():
    """It reaches 10 in at most a tenth of the runs."""
    bare = CheckResult(id="lossless", claim="", verdict=Verdict.PASS, summary="")
    test = StatisticalTest(name="e", statistic=0, log10_e=1.5, allowed=math.nan, failed=False, num_samples=1)
    [often, seldom] = promises([replace(bare, tests=(test,))] * 30)
    assert (often.num_alarms, seldom.num_alarms) == (30, 0)
    assert often.verdict is Verdict.FAIL


def test_tests_that_differ_in_their_prompt_alone_count_together():
    """Four first tokens are one test, four times."""
    four = [one for n in range(4) for one in results(np.full(5, 0.5), f"first token after p{n}, chi-square")]
    assert {(promise.test, promise.num_runs) for promise in promises(four)} == {("first token, chi-square", 20)}


@pytest.mark.parametrize("failed", [0, 1])
def test_a_run_that_the_judge_failed_is_one_too_many(failed: int):
    """At one in a million, none is expected."""
    kept = tuple(promises(results(np.random.default_rng(0).random(400))))
    calibration = Calibration(num_runs=400, num_failed=failed, promises=kept)
    assert calibration.verdict is (Verdict.FAIL if failed else Verdict.PASS)


def test_every_run_has_a_seed_of_its_own():
    """Ten runs of the healthy decoder over hashed models: no run is failed, and no two p-values are alike."""
    plan = Plan(lossless_tokens=300, first_token_samples=20, max_new_tokens=8, batch_size=32, only=("lossless",))
    calibration = calibrate(subject(), plan, runs=5)
    assert calibration.num_failed == 0
    assert {promise.num_runs for promise in calibration.promises} == {5, 20}


def test_a_calibration_goes_on_where_it_was():
    """Two runs, written and read again, then three more, count as five at once; nothing is run when all are there."""
    plan = Plan(lossless_tokens=150, first_token_samples=20, max_new_tokens=8, batch_size=32, only=("lossless",))
    kept: list[Counted] = []
    whole = calibrate(subject(), plan, runs=5, keep=kept.append)
    again = load_as(Counted, dump(kept[1]))
    assert (again.num_runs, len(kept)) == (2, 5)
    assert calibrate(subject(), plan, runs=5, counted=again) == whole
    assert calibrate(subject(), plan, runs=5, counted=kept[-1], keep=kept.append) == whole
    assert len(kept) == 5
