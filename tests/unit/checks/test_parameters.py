"""A setting that is suspicious is asked more, and what has a p-value isn't chosen by what it says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specverify.certify import run_check
from specverify.checks.parameters import parameters
from specverify.faults import find_fault
from specverify.judge import judge
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.records import Verdict

HEALTHY = small_subject()
PLAN = replace(SMALL_PLAN, parameter_tokens=96, seed=1, largest_undetected_shift_per_setting=1.0)


def judged(subject, plan=PLAN):
    return judge([run_check(parameters, subject, plan)], plan.false_fail_rate)[0][0]


@pytest.mark.parametrize("name", ["residual-from-target", "draft-noise-in-accept"])
def test_suspicion_of_one_setting_is_followed_until_it_is_settled(name):
    """96 tokens a setting leave a suspicion, and more of them are the proof; the PIT is of the first ones alone."""
    healthy, result = judged(HEALTHY), judged(find_fault(name).plant(HEALTHY))
    assert healthy.verdict is Verdict.PASS
    assert result.verdict is Verdict.FAIL
    assert result.num_samples > 2 * healthy.num_samples, result.summary
    assert "e-process" in result.summary
    for each, shows in ((healthy, False), (result, True)):
        evidence, limit = each.plots[0].series
        assert (max(evidence.y) >= limit.y[0]) == shows
    pooled = [test.num_samples for test in result.tests if test.p_value is not None]
    assert all(number < 1.5 * healthy.num_samples for number in pooled), pooled


def test_the_number_of_tokens_that_it_names_is_enough():
    plan = replace(PLAN, largest_undetected_shift_per_setting=0.5)
    short = judged(HEALTHY, plan)
    assert short.verdict is Verdict.INCONCLUSIVE
    named = int(re.search(r"set parameter_tokens = (\d+) in the plan", short.summary)[1])
    assert named > plan.parameter_tokens
    enough = judged(HEALTHY, replace(plan, parameter_tokens=named))
    assert enough.verdict is Verdict.PASS, enough.summary
