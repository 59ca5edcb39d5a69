"""An engine held against the laws that it tells itself: a sound one passes, planted faults of law and greediness are caught."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from specverify.conformance import laws_of_models
from specverify.conformance.by_engine import _Scorer, certify_by_engine
from specverify.conformance.cells import engine_plan
from specverify.engines import Capability
from specverify.engines.fake import fake_engine, laws_of
from specverify.errors import PlanError, SubjectError
from specverify.faults.engine import find_engine_fault
from specverify.models.absent import Absent
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, Verdict
from specverify.told_law import score_by_told_laws

PLAN = replace(engine_plan("quick"), lossless_tokens=3_000, largest_undetected_shift=0.1)
TOP = 6


def run(fault: str = "", *, opposed: bool = True, with_draft: bool = True, only=(), off=None, seed: int = 17):
    engine = fake_engine(opposed=opposed)
    laws = laws_of_models(engine.target, engine.draft if with_draft else None, eos_token_ids=(0,), seed=seed)
    absent = Absent(name="far away", vocab_size=24, max_length=128)
    faulty = find_engine_fault(fault).plant(engine) if fault else engine
    plan = replace(PLAN, only=tuple(only), seed=seed)
    return certify_by_engine(faulty, off or engine, replace(laws, target=absent), plan, top=TOP)


def verdicts(certificate):
    return {check.id: check.verdict for check in certificate.checks}


def test_a_sound_engine_passes():
    """And nobody asked the target, which raises when it is asked."""
    certificate = run()
    assert set(verdicts(certificate)) == {"off/greedy", "off/lossless", "drafting", "vocabulary", "greedy", "lossless"}
    assert certificate.verdict is Verdict.PASS, certificate.headline
    law = next(check for check in certificate.checks if check.id == "lossless")
    assert 0.05 < law.measurements["share_in_the_atom"] < 0.95


@pytest.mark.parametrize(
    ("fault", "cell", "with_draft"),
    [
        ("draft-answers", "lossless", True),
        ("draft-answers", "lossless", False),
        ("always-greedy", "lossless", False),
        ("stale-without-draft", "greedy", False),
        ("answers-swapped", "greedy", False),
    ],
)
def test_planted_faults_are_caught(fault, cell, with_draft):
    """A leak of the draft is seen without the draft's law, too."""
    found = verdicts(run(fault, opposed=cell == "lossless", with_draft=with_draft, only=(cell,)))
    assert found == {f"off/{cell}": Verdict.PASS, cell: Verdict.FAIL}


def test_an_engine_whose_own_texts_do_not_follow_what_it_tells_is_in_doubt():
    """Nothing is then said about speculation."""
    liar = find_engine_fault("always-greedy").plant(fake_engine(opposed=True))
    found = verdicts(run(only=("lossless",), off=liar))
    assert found == {"off/lossless": Verdict.FAIL, "lossless": Verdict.NOT_RUN}


@pytest.mark.nightly
def test_sound_engines_raise_no_alarm_in_twenty_repeats():
    for seed in range(20):
        assert run(seed=seed).verdict is Verdict.PASS


class Silent:
    """An engine that tells no laws."""

    def __init__(self, inner):
        self.inner, self.name, self.parameters = inner, "silent", inner.parameters
        self.capabilities = inner.capabilities - {Capability.PROMPT_LOGPROBS}


@pytest.mark.parametrize(
    ("off", "params", "said"),
    [
        (None, SamplingParams(), "needs the engine without speculation"),
        (Silent(fake_engine()), SamplingParams(), "silent tells no log-probabilities of a prompt"),
        (fake_engine(), SamplingParams(top_k=5), "temperature 1 without filters"),
        (fake_engine(), SamplingParams(temperature=0.7), "temperature 1 without filters"),
    ],
)
def test_what_can_not_be_scored_so_is_refused(off, params, said):
    engine = fake_engine()
    laws = laws_of_models(engine.target, None, eos_token_ids=(0,), seed=1)
    with pytest.raises(PlanError, match=said):
        certify_by_engine(engine, off, laws, replace(PLAN, params=params))


# -------------------------------------------------------------------------------------------------------- the scores


def texts(engine, *, temperature: float = 1.0, number: int = 400):
    params = SamplingParams(temperature=temperature, max_new_tokens=8, eos_token_ids=(0,))
    request = DecodeRequest(id="r", prompt_ids=(3, 5), params=params, seed=4, num_samples=number, speculation=False)
    return list(engine.decode([request]))


def test_pit_of_coarse_laws_is_uniform_for_a_sound_sampler_alone():
    """Whether the token is one of the likeliest must not decide which cells there are."""
    engine = fake_engine()
    for temperature, sound in ((1.0, True), (0.6, False)):
        traces = texts(engine, temperature=temperature)
        scored = score_by_told_laws(traces, list(laws_of(engine.target, traces, top=TOP)), top=TOP, draft=engine.draft)
        worst = min(stats.kstest(scored[order], "uniform").pvalue for order in ("pit_id", "pit_prob", "pit_ratio"))
        assert bool(worst > 1e-3) == sound, worst


@pytest.mark.parametrize("name", ["greedy", "lossless"])
def test_where_nothing_is_drafted_nothing_is_shown(name):
    found = verdicts(run("nothing-drafted", only=(name,)))
    assert found == {f"off/{name}": Verdict.PASS, name: Verdict.INCONCLUSIVE}


def test_fault_ratios_average_to_one_over_the_cells():
    """So no bet on them can be won against a sound engine."""
    engine = fake_engine()
    traces = texts(engine, number=2_000)
    scored = score_by_told_laws(traces, list(laws_of(engine.target, traces, top=TOP)), top=TOP, draft=engine.draft)
    for name, ratio in scored.fault_ratios.items():
        error = ratio.std() / math.sqrt(len(ratio))
        assert ratio.mean() < 1 + 5 * error + 1e-9, name


def test_an_atom_that_rounding_has_used_up_pays_no_more_than_is_fair():
    """Twenty ids hold all but 1.7e-8, of which nothing is left in float32; the draft has its mass there, and every bet is fair."""
    rng, top = np.random.default_rng(0), 20
    draft = SimpleNamespace(vocab_size=2_000, logits=lambda sequences: torch.zeros(len(sequences), 1, 2_000))
    for _ in range(10):
        logits = torch.tensor([18, *rng.normal(5, 1, top - 1), *rng.normal(-8, 1, 2_000 - top)])
        told, exact = logits.float().log_softmax(-1).tolist(), logits.softmax(-1)
        likeliest = dict(enumerate(told[:top]))
        request = DecodeRequest(id="r", prompt_ids=(3,), params=SamplingParams(), seed=1)
        one = DecodeTrace(request=request, sample=0, token_ids=(0,), finish=FinishReason.LENGTH)
        traces = [replace(one, token_ids=(token,)) for token in range(top + 1)]
        laws = [[{**likeliest, token: told[token]}] for token in range(top + 1)]
        scored = score_by_told_laws(traces, laws, top=top, draft=draft)
        probs = [*exact[:top].tolist(), float(exact[top:].sum())]
        for name, ratio in scored.fault_ratios.items():
            assert np.dot(probs, ratio) < 1 + 1e-5, name


def test_a_logprob_that_is_no_number_allows_for_nothing():
    """It would else widen what a greedy token may lie below the first choice to the most that is ever allowed."""
    engine = fake_engine()
    traces = texts(engine, number=2)
    told = [[law[token] for law, token in zip(laws, trace.token_ids, strict=True)]
            for laws, trace in zip(laws_of(engine.target, traces, top=1), traces, strict=True)]  # fmt: skip
    for odd in (math.inf, -math.inf, math.nan):
        seen = [replace(trace, logprobs=(odd, *values[1:])) for trace, values in zip(traces, told, strict=True)]
        assert _Scorer(engine, None, TOP).noise(seen) == pytest.approx(1e-6)


def test_gap_and_token_are_those_of_the_emitted_token():
    engine = fake_engine()
    traces = texts(engine, number=20)
    told = list(laws_of(engine.target, traces, top=TOP))
    scored = score_by_told_laws(traces, told, top=TOP)
    flat = [
        (law, token)
        for laws, trace in zip(told, traces, strict=True)
        for law, token in zip(laws, trace.token_ids, strict=True)
    ]
    np.testing.assert_allclose(scored["gap"], [max(law.values()) - law[token] for law, token in flat])
    np.testing.assert_array_equal(scored["token"], [token for _, token in flat])
    np.testing.assert_array_equal(scored["in_atom"], [len(law) > TOP for law, _ in flat])


def test_laws_that_lack_a_token_are_a_finding():
    engine = fake_engine()
    traces = texts(engine, number=1)
    told = list(laws_of(engine.target, traces, top=TOP))
    with pytest.raises(SubjectError, match="laws were told of the"):
        score_by_told_laws(traces, [told[0][:-1]], top=TOP)
    told[0][0] = {99: -1.0}
    with pytest.raises(SubjectError, match="lacks its own token"):
        score_by_told_laws(traces, told, top=TOP)
