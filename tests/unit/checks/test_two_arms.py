"""Two arms: what differs is seen, what doesn't is not, and the controls decide what the answer is worth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from specverify.certify import CHECKS, Transcripts, chosen, run_check
from specverify.checks.check import derived_seed
from specverify.checks.two_arms import compare_arms, two_arms
from specverify.drafting import NoDraft
from specverify.engines import Capability
from specverify.engines.reference import ReferenceEngine
from specverify.faults import find_fault
from specverify.judge import judge
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.models.hashed import VOCAB_SIZE
from specverify.plan import BUDGETS, Plan
from specverify.records import Verdict

PLAN = replace(SMALL_PLAN, two_arms_tokens=2_500)
HEALTHY = small_subject()


def judged(subject, plan=PLAN):
    """The result against the whole budget."""
    return judge([run_check(two_arms, subject, plan)], plan.false_fail_rate)[0][0]


def test_a_healthy_engine_passes_and_its_controls_say_so():
    """ON is OFF, OFF is OFF, and the lossy arm is not."""
    result = judged(HEALTHY)
    assert result.verdict is Verdict.PASS, result.summary
    assert result.measurements["log10_e_off_against_off"] < 3
    assert result.measurements["log10_e_lossy_against_off"] >= 3
    assert len(result.plots[0].series) == 4
    assert result.plots[0].series[-1].y[0] >= max(test.allowed for test in result.tests if test.log10_e is not None)


@pytest.mark.parametrize("name", ["always-accept", "draft-noise-in-accept", "residual-from-target"])
def test_a_lossy_engine_fails(name):
    """Tokens that change with speculation."""
    result = judged(find_fault(name).plant(HEALTHY))
    assert result.verdict is Verdict.FAIL, result.summary
    assert "ON against OFF" in result.summary


def test_suspicion_is_followed_until_it_is_settled():
    """The first 48 pairs leave a suspicion; more of ON and OFF are asked by themselves, and prove it."""
    result = judged(find_fault("residual-from-target").plant(HEALTHY), replace(PLAN, two_arms_tokens=700, seed=1))
    assert result.verdict is Verdict.FAIL
    assert result.num_samples > 48
    assert judged(HEALTHY, replace(PLAN, two_arms_tokens=700, seed=1)).num_samples == 48


@dataclass(frozen=True)
class Around:
    """The healthy engine, changed."""

    inner: ReferenceEngine = HEALTHY.engine
    capabilities: frozenset = HEALTHY.engine.capabilities
    wrong_arm: str = ""
    name: str = "around"
    parameters: frozenset = HEALTHY.engine.parameters

    def decode(self, requests):
        """One arm is answered at another temperature."""
        for trace in self.inner.decode([self.asked(request) for request in requests]):
            [request] = [each for each in requests if each.id == trace.request.id]
            yield replace(trace, request=request)

    def asked(self, request):
        """Colder, and with the arm's own name forgotten."""
        if f"/{self.wrong_arm}/" in request.id:
            return replace(request, params=replace(request.params, temperature=0.4))
        return request


def test_off_arms_that_differ_are_doubt_and_no_fail():
    """Somebody else's OFF arm that drifts says that nothing can be said."""
    result = judged(replace(HEALTHY, engine=Around(wrong_arm="off-again"), decoder=None))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "in doubt" in result.summary
    assert result.tests == ()


def test_too_few_texts_are_inconclusive():
    """The lossy arm isn't seen, so neither would a fault be."""
    result = judged(HEALTHY, replace(PLAN, two_arms_tokens=100))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "two_arms_tokens" in result.summary


def test_nothing_drafted_is_inconclusive():
    """Two OFF arms are compared with ease."""
    decoder = replace(HEALTHY.decoder, drafter=NoDraft(VOCAB_SIZE))
    result = judged(replace(HEALTHY, decoder=decoder, engine=ReferenceEngine(decoder)))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "nothing was drafted" in result.summary


def test_an_engine_without_the_switch_is_not_run():
    """And nothing is asked of it."""
    engine = Around(capabilities=HEALTHY.engine.capabilities - {Capability.SPECULATION_SWITCH})
    result = judged(replace(HEALTHY, engine=engine))
    assert result.verdict is Verdict.NOT_RUN
    assert not list(two_arms.rounds(replace(HEALTHY, engine=engine), PLAN))


def test_it_runs_where_it_is_named_or_with_the_deep_budget():
    """It costs as much as all others together."""
    assert two_arms not in CHECKS
    assert two_arms not in chosen(Plan())
    assert chosen(Plan(only=("two-arms",))) == (two_arms,)
    assert two_arms in chosen(replace(Plan(budget="deep"), **BUDGETS["deep"]))


def test_arms_of_one_law_rarely_differ():
    """The e-value reaches 10 in at most a tenth of healthy comparisons, at any time."""
    asked = [replace(PLAN, seed=derived_seed(1, str(number)), two_arms_tokens=250) for number in range(12)]
    reached = 0
    for plan in asked:
        rounds = list(two_arms.rounds(HEALTHY, plan))[1:3]
        transcripts = Transcripts(HEALTHY)
        reached += compare_arms(*(transcripts.answer(each) for each in rounds)).log10_max >= 1
    assert reached <= 4  # more has a chance of 0.4 % at a rate of 0.1


def test_texts_are_paired_by_prompt_and_sample():
    """A text without its partner says nothing."""
    transcripts = Transcripts(HEALTHY)
    on, off = (
        transcripts.answer(each) for each in list(two_arms.rounds(HEALTHY, replace(PLAN, two_arms_tokens=250)))[:2]
    )
    fewer = replace(off, traces=off.traces[:-3]).where(off["trace"] < len(off.traces) - 3)
    assert len(compare_arms(on, off).path) == len(on.traces)
    assert len(compare_arms(on, fewer).path) == len(on.traces) - 3
    assert np.isfinite(compare_arms(on, off).path).all()


def test_more_pairs_show_less():
    """Of the mean difference in units of its spread, in the test as in the result."""
    few, many = (run_check(two_arms, HEALTHY, replace(PLAN, two_arms_tokens=tokens)) for tokens in (1_300, 5_200))
    for result in (few, many):
        assert result.tests[0].smallest_detectable == result.smallest_detectable
        assert "root mean square" in result.effect_unit
    assert few.smallest_detectable > 1.5 * many.smallest_detectable
