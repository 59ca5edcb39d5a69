"""Faults of whole engines against the cells: each is caught by its own, and the sound fake by none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.conformance import CELLS, engine_plan, laws_of_models, qualify_engine
from specverify.engines.arms import TargetOnly
from specverify.engines.fake import fake_engine, letters
from specverify.errors import PlanError
from specverify.faults.engine import ENGINE_FAULTS, find_engine_fault
from specverify.records import Verdict


def _laws(engine, seed=17):
    return laws_of_models(engine.target, engine.draft, eos_token_ids=(0,), seed=seed, detokenize=letters)


@pytest.mark.parametrize("fault", ENGINE_FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught_by_its_cell(fault):
    """Within the quick budget, and with a sentence that can be reproduced."""
    sound = fake_engine()
    plan = engine_plan("quick", only=(fault.caught_by,))
    certificate = qualify_engine(fault.plant(sound), None, None, _laws(sound), plan, fault=fault.name)
    (result,) = certificate.checks
    assert result.verdict is fault.verdict, f"{fault.name} was not caught by {result.id}: {result.summary}"


def test_sound_engine_passes_every_cell():
    """On both arms, so nothing is failed, undecided or left out."""
    sound = fake_engine()
    certificate = qualify_engine(sound, sound, TargetOnly(fake_engine()), _laws(sound), engine_plan("quick"))
    assert {result.id: result.verdict for result in certificate.checks if result.verdict is not Verdict.PASS} == {}
    assert certificate.verdict is Verdict.PASS
    assert "No difference from the target alone was found in fake" in certificate.headline


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("opposed", [False, True])
def test_sound_engine_raises_no_alarm(seed, opposed):
    """Twenty times, on laws, prompts and seeds that differ each time."""
    sound = fake_engine(seed=seed, opposed=opposed)
    certificate = qualify_engine(sound, sound, None, _laws(sound, seed), engine_plan("quick", seed=seed))
    failed = {result.id: result.summary for result in certificate.checks if result.verdict is Verdict.FAIL}
    assert failed == {}


def test_every_cell_catches_a_fault_and_every_fault_has_a_meaning_of_its_own():
    """At least twenty, and no cell that nothing was shown to fail."""
    assert len(ENGINE_FAULTS) >= 20
    assert (
        len({fault.name for fault in ENGINE_FAULTS})
        == len({fault.stands_for for fault in ENGINE_FAULTS})
        == len(ENGINE_FAULTS)
    )
    assert {fault.caught_by for fault in ENGINE_FAULTS} == {cell.id for cell in CELLS}


def test_an_off_arm_that_fails_puts_reference_or_adapter_in_doubt():
    """Nothing is said about speculation then, and the verdict says why."""
    sound = fake_engine()
    broken = find_engine_fault("ban-ignored").plant(fake_engine())
    certificate = qualify_engine(
        broken, broken, None, _laws(sound), engine_plan("quick", only=("parameters", "vocabulary"))
    )
    verdicts = {result.id: result.verdict for result in certificate.checks}
    assert verdicts == {
        "off/parameters": Verdict.FAIL, "vocabulary": Verdict.PASS, "parameters": Verdict.NOT_RUN,
    }  # fmt: skip
    assert "the reference or the adapter is in doubt" in certificate.headline


def test_unknown_fault_says_the_nearest():
    """As everywhere."""
    with pytest.raises(PlanError, match="did you mean seed-ignored"):
        find_engine_fault("seed-ignore")


def test_what_an_engine_refuses_aloud_is_not_asked():
    """Refused is fine: the cell holds what is left, and says what it left out."""
    from specverify.errors import RequestRefused

    class Refuses:
        def __init__(self, inner):
            self.inner, self.name = inner, "refuses"
            self.capabilities, self.parameters = inner.capabilities, inner.parameters

        def decode(self, requests):
            if any(request.params.min_p for request in requests):
                msg = "min_p is not supported"
                raise RequestRefused(msg)
            return self.inner.decode(requests)

        def counters(self):
            return self.inner.counters()

    sound = fake_engine()
    plan = replace(engine_plan("quick"), only=("parameters",))
    (result,) = qualify_engine(Refuses(sound), None, None, _laws(sound), plan).checks
    assert result.verdict is Verdict.PASS
    assert any("does not take it: min_p" in finding.text for finding in result.findings)


class _ItsOwnEosAlone:
    """An engine that ends a text at EOS 0 and at no id of the request's, and says so."""

    def __init__(self, inner):
        self.inner, self.name = inner, "its own EOS alone"
        self.capabilities = inner.capabilities
        self.parameters = inner.parameters - {"stop_token_ids", "min_new_tokens"}

    def decode(self, requests):
        from specverify.errors import RequestRefused

        if any(set(request.params.eos_token_ids) - {0} for request in requests):
            msg = "another EOS than the model's own"
            raise RequestRefused(msg)
        eos = {request: () if (0,) in request.params.banned_token_ids else (0,) for request in requests}
        own = [replace(request, params=replace(request.params, eos_token_ids=eos[request])) for request in requests]
        rows = (request for request in requests for _ in range(request.num_samples))
        for request, trace in zip(rows, self.inner.decode(own), strict=True):
            yield replace(trace, request=request)

    def counters(self):
        return self.inner.counters()


@pytest.mark.parametrize("seed", range(1, 5))
def test_stop_strings_are_held_where_a_text_ends_at_the_models_own_eos_unasked(seed):
    """An EOS that comes first is no missed stop string."""
    sound = fake_engine()
    plan = engine_plan("quick", only=("stop_strings",), seed=seed)
    (result,) = qualify_engine(_ItsOwnEosAlone(sound), None, None, _laws(sound, seed), plan).checks
    assert result.verdict is Verdict.PASS, result.summary


@pytest.mark.parametrize(("fault", "verdict"), [("", Verdict.PASS), ("eos-passed-over", Verdict.FAIL)])
def test_an_engine_with_no_eos_but_its_own_is_held_to_that(fault, verdict):
    """By prompts after which the target says it, at every place of a text."""
    sound = fake_engine()
    engine = _ItsOwnEosAlone(find_engine_fault(fault).plant(sound) if fault else sound)
    (result,) = qualify_engine(engine, None, None, _laws(sound), engine_plan("quick", only=("stopping",))).checks
    assert result.verdict is verdict, result.summary
    assert result.measurements["num_texts"] > 80
