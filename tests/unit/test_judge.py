"""The judge's sentence: a pair may go out only after the whole list of checks."""

from __future__ import annotations

import pytest

from specverify.judge import headline
from specverify.records import CheckResult, Verdict


def result(check_id: str, verdict: Verdict = Verdict.PASS) -> CheckResult:
    """A check that ended so."""
    return CheckResult(id=check_id, claim="", verdict=verdict, summary="")


def test_the_whole_list_lets_a_pair_out():
    """And nothing less does, cost included."""
    passed = [result("lossless"), result("cost")]
    assert headline(passed, fault="", whole=True).startswith("This pair may go out")
    for part in (passed, passed[:1], passed[1:]):
        assert "only a run of all checks can let the pair out" in headline(part, fault="", whole=False)


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
