"""The judge's sentence: a pair may go out only after the whole list of checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.judge import headline, judge
from specverify.records import CheckResult, StatisticalTest, Verdict


def result(check_id: str, verdict: Verdict = Verdict.PASS) -> CheckResult:
    """A check that ended so."""
    return CheckResult(id=check_id, claim="", verdict=verdict, summary="")


def test_the_whole_list_lets_a_pair_out():
    """And nothing less does, cost included."""
    passed = [result("greedy"), result("lossless"), result("cost")]
    assert headline(passed, fault="", whole=True).endswith("and speculation pays.")
    assert "your engine was not run" in headline(passed, fault="", whole=True)
    assert "in vllm no check" in headline(passed, fault="", whole=True, engine="vllm")
    for part in (passed, passed[:1], passed[1:]):
        assert "only a run of all checks can let the pair out" in headline(part, fault="", whole=False)


def test_what_did_not_run_is_named_and_never_claimed():
    """Speculation pays only where it was measured; without the sampled stream no pair is let out."""
    unmeasured = [result("greedy"), result("lossless"), result("cost", Verdict.NOT_RUN)]
    assert headline(unmeasured, fault="", whole=True).endswith(
        "whether speculation pays was not measured (cost did not run)."
    )
    blind = [result("greedy"), result("lossless", Verdict.NOT_RUN), result("cost")]
    assert "can let the pair out" in headline(blind, fault="", whole=True)


def test_a_refusal_on_acceptance_is_no_proof_of_loss():
    """The plan's minimum was not met; only a failed test says that the law is wrong."""
    refused = [result("greedy"), result("lossless"), result("acceptance", Verdict.FAIL)]
    assert headline(refused, fault="", whole=True).startswith("Refused a rollout on acceptance")
    test = StatisticalTest(name="t", statistic=0, p_value=0, allowed=1e-6, failed=True, num_samples=1)
    wrong = [*refused[:2], replace(refused[2], tests=(test,))]
    assert headline(wrong, fault="", whole=True) == "Do not roll this out: acceptance failed."


def test_a_slow_pair_whose_correctness_is_open_says_both():
    """No check failed, but one was not settled."""
    both = [result("lossless", Verdict.INCONCLUSIVE), result("cost", Verdict.FAIL)]
    assert "correctness is not settled (lossless)" in headline(both, fault="", whole=True)


def test_slowness_catches_no_fault():
    """A poor draft fails cost with every fault and without."""
    assert "NOT caught" in headline([result("lossless"), result("cost", Verdict.FAIL)], fault="x", whole=True)


@pytest.mark.parametrize(("whole", "said"), [(True, "no check of correctness failed"), (False, "not checked in full")])
def test_a_refusal_on_cost_says_what_is_known_of_correctness(whole, said):
    """It claims no correctness that wasn't checked."""
    assert said in headline([result("cost", Verdict.FAIL)], fault="", whole=whole)


def test_what_is_wrong_outranks_what_is_slow():
    """A wrong pair isn't refused on cost."""
    both = [result("lossless", Verdict.FAIL), result("cost", Verdict.FAIL)]
    assert headline(both, fault="", whole=True) == "Do not roll this out: lossless, cost failed."


def test_a_planted_fault_is_named_whether_it_is_caught_or_not():
    """So that a demonstration can't be taken for a certificate."""
    assert (
        headline([result("greedy", Verdict.FAIL)], fault="x", whole=True)
        == "The planted fault 'x' was caught by greedy."
    )
    assert "NOT caught" in headline([result("greedy")], fault="x", whole=True)


def test_tests_that_are_to_come_have_their_share():
    """Of 10 e-processes and 4 p-values each gets what it will get in the whole run."""
    tests = (
        StatisticalTest(name="e", statistic=0, log10_e=7.0, allowed=1, failed=False, num_samples=1),
        StatisticalTest(name="p", statistic=0, p_value=2e-7, allowed=1, failed=False, num_samples=1),
    )
    [alone], _ = judge([replace(result("lossless"), tests=tests)], 1e-6)
    [part], budget = judge([replace(result("lossless"), tests=tests)], 1e-6, least_e_processes=10, least_p_values=4)
    assert [test.failed for test in alone.tests] == [True, True]
    assert [test.failed for test in part.tests] == [False, False]
    assert (budget.num_e_processes, budget.num_p_values) == (10, 4)
