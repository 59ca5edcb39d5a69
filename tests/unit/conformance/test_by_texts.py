"""An engine of which only texts are known: a sound one passes, planted faults are caught, and too few texts are no answer."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from specverify.checks.evidence import least_level
from specverify.conformance import laws_of_models
from specverify.conformance.by_texts import _smallest_gap, certify_by_texts
from specverify.conformance.cells import engine_plan
from specverify.engines.fake import fake_engine
from specverify.errors import PlanError
from specverify.faults.engine import find_engine_fault
from specverify.models.absent import Absent
from specverify.records import SamplingParams, Verdict

PLAN = replace(engine_plan("quick"), lossless_tokens=30_000)
FAKE = fake_engine(opposed=True)


def run(engine, *, off=FAKE, with_draft=True, only=(), **changes):
    laws = laws_of_models(FAKE.target, FAKE.draft if with_draft else None, eos_token_ids=(0,), seed=17)
    absent = Absent(name="far away", vocab_size=24, max_length=128)
    return certify_by_texts(engine, off, replace(laws, target=absent), replace(PLAN, only=tuple(only), **changes))


def only(name, engine, **kwargs):
    (result,) = run(engine, only=(name,), **kwargs).checks
    return result


def planted(name):
    return find_engine_fault(name).plant(FAKE)


class Around:
    """The sound engine, some of whose requests are answered as others."""

    name, inner = "around", FAKE

    def __init__(self, change=None):
        self.change = change

    @property
    def capabilities(self):
        return self.inner.capabilities

    @property
    def parameters(self):
        return self.inner.parameters

    def decode(self, requests):
        asked = [self.change(request) for request in requests]
        rows = [request for request in requests for _ in range(request.num_samples)]
        for request, trace in zip(rows, self.inner.decode(asked), strict=True):
            yield replace(trace, request=request)


def at(share):
    """Texts with speculation at a share of the temperature."""
    return Around(
        lambda request: (
            replace(request, params=replace(request.params, temperature=share * request.params.temperature))
            if request.speculation
            else request
        )
    )


@pytest.mark.parametrize("with_draft", [True, False])
def test_a_sound_engine_passes(with_draft):
    """And nobody asked the target, which raises when it is asked."""
    certificate = run(FAKE, with_draft=with_draft)
    assert {check.id for check in certificate.checks} == {"drafting", "vocabulary", "greedy", "lossless"}
    assert certificate.verdict is Verdict.PASS, certificate.headline
    texts = certificate.checks[-1]
    assert texts.measurements["log10_e_lossy_against_off"] >= 3
    assert 0 < texts.smallest_detectable < 2


@pytest.mark.parametrize(
    ("fault", "with_draft"),
    [("draft-answers", True), ("draft-answers", False), ("always-greedy", False), ("samples-alike", False)],
)
def test_texts_that_speculation_changes_are_caught(fault, with_draft):
    """A leak of the draft is seen without the draft's law, too; the first suspicion of it extends the run by itself."""
    result = only("lossless", planted(fault), with_draft=with_draft)
    assert result.verdict is Verdict.FAIL, result.summary
    assert "ON against OFF" in result.summary


def test_any_parameters_may_be_asked():
    """No law need be known: a filter that is left out with speculation shows."""
    params = SamplingParams(temperature=0.5)
    assert only("lossless", planted("temperature-ignored"), with_draft=False, params=params).verdict is Verdict.FAIL


def test_suspicion_is_followed_until_it_is_settled():
    """The first texts leave a suspicion, and later ones are the proof."""
    few = only("lossless", at(0.7), with_draft=False, lossless_tokens=20_000, seed=1)
    assert few.verdict is Verdict.FAIL
    assert few.num_samples == 2 * 53 * 24, few.summary


def test_too_few_texts_are_no_answer():
    """What a colder arm doesn't show in, proves nothing."""
    result = only("lossless", FAKE, with_draft=False, lossless_tokens=400)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "too few: an arm at 0.7 of the temperature was not seen" in result.summary
    assert "raise lossless_tokens in the plan" in result.summary


@pytest.mark.parametrize("name", ["greedy", "lossless"])
def test_where_nothing_is_drafted_nothing_is_shown(name):
    result = only(name, planted("nothing-drafted"))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "nothing was drafted" in result.summary


def test_arms_without_speculation_that_differ_are_in_doubt():
    """Nothing is then said about speculation."""
    drifting = Around(
        lambda request: (
            replace(request, params=replace(request.params, temperature=0.5)) if "off-again" in request.id else request
        )
    )
    result = only("lossless", drifting, off=drifting, with_draft=False)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert not result.tests
    assert "target-only texts differ from target-only texts" in result.summary


# ------------------------------------------------------------------------------------------------------------- greedy


def test_wrong_greedy_tokens_are_told_from_near_ties_by_the_engines_own_samples():
    """The wrong token is hardly ever drawn without speculation."""
    result = only("greedy", planted("answers-swapped"))
    assert result.verdict is Verdict.FAIL
    assert "tokens that differ are near ties" in result.summary
    assert any("times in 400 at temperature 1" in finding.text for finding in result.findings)


class Turned(Around):
    """Greedy texts with speculation end with another id at the first place where it is so many logits below the first choice."""

    def __init__(self, least, most):
        super().__init__()
        self.least, self.most = least, most

    def decode(self, requests):
        for trace in self.inner.decode(requests):
            turned = trace.request.speculation and trace.request.params.greedy
            yield self.turn(trace) if turned else trace

    def turn(self, trace):
        for place in range(len(trace.token_ids)):
            row = FAKE.target.logits([(*trace.request.prompt_ids, *trace.token_ids[:place])])[0, -1]
            for token, gap in enumerate((row.max() - row).tolist()):
                if self.least < gap < self.most:
                    return replace(trace, token_ids=(*trace.token_ids[:place], token), steps=())
        return trace


@pytest.mark.parametrize(("least", "most", "verdict"), [(0.0, 0.4, Verdict.PASS), (2.5, 9.0, Verdict.FAIL)])
def test_a_near_tie_passes_and_a_token_that_is_hardly_drawn_does_not(least, most, verdict):
    """Rounding may turn the first, and never the second; texts differ in both."""
    result = only("greedy", Turned(least, most), greedy_prompts=8)  # as many places as are looked at
    assert result.verdict is verdict, result.summary
    differing, of = re.findall(r"(\d+) of (\d+) texts", result.summary)[0]
    assert 0 < int(differing) <= int(of)


def test_the_gap_that_is_promised_is_seen():
    """A token that is rarer than promised is rejected in at least 1 - false_pass_rate of draws; the bound of a near tie hardly ever."""
    level = least_level(PLAN) / 3
    for total in (60, 100, 400):
        gap = _smallest_gap(total, PLAN, num_places=3)
        if total == 60:
            assert gap == math.inf
            continue
        drawn = stats.binom.rvs(total, 1 / (1 + math.exp(gap)), size=4_000, random_state=5)
        rejected = stats.binom.cdf(drawn, total, 1 / (1 + math.e)) <= level
        assert abs(rejected.mean() - (1 - PLAN.false_pass_rate)) < 0.03
        assert gap > 1


def test_a_greedy_text_that_ends_early_fails():
    """It is the beginning of the other, and no near tie."""

    class Short(Around):
        def decode(self, requests):
            for trace in self.inner.decode(requests):
                cut = trace.request.speculation and trace.request.params.greedy
                yield replace(trace, token_ids=trace.token_ids[:3], steps=()) if cut else trace

    result = only("greedy", Short())
    assert result.verdict is Verdict.FAIL
    assert "over after 3 tokens in one arm and goes on in the other" in result.summary


# -------------------------------------------------------------------------------------------------------------- size


def test_an_engine_without_an_off_arm_is_refused():
    with pytest.raises(PlanError, match="--score-by texts needs the engine without speculation"):
        run(FAKE, off=None)


@pytest.mark.nightly
def test_sound_engines_raise_no_alarm_and_the_promised_effect_shows():
    """Twenty seeds: none fails, the evidence reaches 10 in two at most; and what is promised to be seen, is."""
    sound = [only("lossless", FAKE, with_draft=False, seed=seed) for seed in range(20)]
    assert all(each.verdict is Verdict.PASS for each in sound)
    assert sum(each.measurements["log10_e_on_against_off"] >= 1 for each in sound) <= 2
    promised = np.median([each.smallest_detectable for each in sound])
    seen = [only("lossless", at(1 - 0.3 * promised), with_draft=False, seed=seed) for seed in range(20)]
    assert sum(each.verdict is Verdict.FAIL for each in seen) >= 16
