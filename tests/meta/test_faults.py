"""Faults against checks: every planted fault is caught by the checks that it names, and the healthy decoder by none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.certify import CHECKS, run_check
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.faults import FAULTS
from specverify.judge import judge
from specverify.plan import Plan
from specverify.records import CheckResult, Verdict
from tests.unit.checks.hashed import VOCAB_SIZE, HashedModel, subject

if TYPE_CHECKING:
    from specverify.subject import Subject

PLAN = Plan(lossless_tokens=9_000, max_new_tokens=16, parameter_tokens=320, greedy_prompts=8, batch_size=128)
BY_ID = {check.id: check for check in CHECKS}
CORRECTNESS = {"exactness", "greedy", "stopping", "reproducibility", "parameters", "lossless", "acceptance"}
CASES = [(fault, check_id) for fault in FAULTS for check_id in fault.caught_by]


def healthy() -> Subject:
    """Hashed models, the draft a good way from the target."""
    base = subject()
    draft = HashedModel("draft", seed=1, near=HashedModel(), disturbed_by=1.0)
    decoder = replace(base.decoder, drafter=DraftModel(draft, VOCAB_SIZE))
    return replace(base, draft=draft, decoder=decoder, engine=ReferenceEngine(decoder))


def judged(check_id: str, asked_of: Subject, plan: Plan = PLAN) -> CheckResult:
    """One check, held against the error budget."""
    return judge([run_check(BY_ID[check_id], asked_of, plan)], plan.false_fail_rate)[0][0]


@pytest.mark.parametrize(("fault", "check_id"), CASES, ids=[f"{fault.name}-{check_id}" for fault, check_id in CASES])
def test_fault_is_caught(fault, check_id):
    """The check that a fault names fails on it."""
    well = healthy()
    broken = fault.apply(well.decoder)
    result = judged(check_id, replace(well, decoder=broken, engine=ReferenceEngine(broken)))
    assert result.verdict is Verdict.FAIL, f"{fault.name} was not caught by {check_id}: {result.summary}"


@pytest.mark.parametrize("check_id", sorted({check_id for fault in FAULTS for check_id in fault.caught_by}))
def test_healthy_decoder_is_not_failed(check_id):
    """What catches faults lets the healthy decoder pass with the same plan."""
    assert judged(check_id, healthy()).verdict is not Verdict.FAIL


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check_id", sorted(CORRECTNESS))
def test_healthy_decoder_raises_no_alarm_at_other_seeds(check_id, seed):
    """Chance alone fails nothing."""
    plan = replace(PLAN, seed=1_000 + seed, lossless_tokens=3_000)
    assert judged(check_id, healthy(), plan).verdict is not Verdict.FAIL


def test_every_fault_and_every_check_has_a_partner():
    """No fault is caught by nothing, and no check of correctness catches none."""
    assert all(fault.caught_by for fault in FAULTS)
    assert {check_id for fault in FAULTS for check_id in fault.caught_by} == CORRECTNESS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
