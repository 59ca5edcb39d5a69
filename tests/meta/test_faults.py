"""Faults against checks: every planted fault is caught by the checks that it names, and the healthy decoder by none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.faults import FAULTS, find_fault
from specverify.kill_matrix import CORRECTNESS, SMALL_PLAN, kill_matrix, measured
from specverify.records import Verdict

BY_ID = {check.id: check for check in CORRECTNESS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault):
    """The first check that a fault names fails on it; the others do in the whole matrix, at night."""
    (result,) = measured(fault, [BY_ID[fault.caught_by[0]]])
    assert result.verdict is Verdict.FAIL, f"{fault.name} was not caught by {result.id}: {result.summary}"


def test_healthy_decoder_is_not_failed():
    """What catches faults lets the healthy decoder pass with the same plan, and every test says what it would have seen."""
    for result in measured(None, CORRECTNESS):
        assert result.verdict is not Verdict.FAIL, f"{result.id}: {result.summary}"
        assert not [test.name for test in result.tests if test.smallest_detectable is None], result.id
        assert all(any(series.y for series in plot.series) for plot in result.plots), result.id
        assert result.plots, result.id


def test_exactness_draws_how_many_digits_agree():
    """A healthy law agrees to the dashed line; a fault's ends before it, in some table at least."""
    healthy, wrong = (
        measured(fault, [BY_ID["exactness"]])[0].plots[0] for fault in (None, find_fault("residual-from-target"))
    )
    (found, limit), (off, _) = healthy.series, wrong.series
    assert min(found.y) > limit.y[0] == pytest.approx(12)
    assert min(off.y) < 3
    assert found.x == off.x


@pytest.mark.parametrize("seed", range(3))
def test_healthy_decoder_raises_no_alarm_at_other_seeds(seed):
    """Chance alone fails nothing: a run may fail once in a million, all of its tests together."""
    for result in measured(None, CORRECTNESS, plan=replace(SMALL_PLAN, seed=1_000 + seed, lossless_tokens=3_000)):
        assert result.verdict is not Verdict.FAIL, f"{result.id}: {result.summary}"


def test_no_fault_is_caught_by_nothing_and_no_check_catches_nothing():
    """With the tests above: no row and no column of the kill matrix is empty."""
    assert all(fault.caught_by for fault in FAULTS)
    assert {fault.caught_by[0] for fault in FAULTS} == set(BY_ID)


def test_each_fault_has_a_name_and_a_meaning_of_its_own():
    """Two faults that stand for the same bug are one."""
    assert len({fault.name for fault in FAULTS}) == len({fault.stands_for for fault in FAULTS}) == len(FAULTS)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_200_seeds_raise_no_alarm(seed):
    """Every check, on the healthy decoder, at the rates that the certificate states."""
    plan = replace(SMALL_PLAN, seed=5_000 + seed, lossless_tokens=3_000)
    alarms = [result.id for result in measured(None, CORRECTNESS, plan=plan) if result.verdict is Verdict.FAIL]
    assert alarms == []


@pytest.mark.nightly
def test_the_whole_matrix():
    """Measured anew: nothing that is promised is missed, and no row or column is empty."""
    matrix = kill_matrix(workers=2)
    assert not matrix.missed
    assert not matrix.empty_rows
    assert not matrix.empty_columns
