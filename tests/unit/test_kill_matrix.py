"""The kill matrix: what is measured, what counts as a kill, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.certify import CHECKS
from specverify.errors import InternalError, PlanError
from specverify.faults import Fault, find_fault
from specverify.faults.fault import unchanged
from specverify.kill_matrix import CORRECTNESS, Cell, KillMatrix, kill_matrix, measured, small_subject
from specverify.records import Verdict

CAUGHT = find_fault("always-accept")
HARMLESS = Fault(name="none", stands_for="nothing", caught_by=("exactness", "greedy"), apply=unchanged)


def cell(fault: str, check_id: str, verdict: Verdict) -> Cell:
    """A cell without figures."""
    return Cell(
        fault=fault, check_id=check_id, verdict=verdict, num_samples=1, sample_unit="texts", crossed_at_tokens=None,
        summary="",
    )  # fmt: skip


def test_a_fault_that_changes_nothing_is_an_empty_row():
    """And what it promises is missed; a check that kills nothing is an empty column."""
    matrix = kill_matrix([HARMLESS, CAUGHT], ["greedy", "stopping"])
    assert matrix.cell("always-accept", "greedy").killed
    assert matrix.missed == (matrix.cell("none", "greedy"),)
    assert matrix.empty_rows == ("none",)
    assert matrix.empty_columns == ("stopping",)


def test_only_a_fail_is_a_kill():
    """A check that could not decide has caught nothing."""
    verdicts = (Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_RUN)
    cells = tuple(cell("none", f"check {verdict}", verdict) for verdict in verdicts)
    matrix = KillMatrix(faults=(HARMLESS,), check_ids=tuple(one.check_id for one in cells), cells=cells)
    assert matrix.empty_rows == ("none",)
    assert matrix.empty_columns == matrix.check_ids


def test_samples_and_the_crossing_are_told():
    """Exact laws for the proof, tokens for the stream, and where its e-process was enough."""
    matrix = kill_matrix([CAUGHT], ["exactness", "lossless"])
    exact, stream = (matrix.cell("always-accept", name) for name in ("exactness", "lossless"))
    assert (exact.num_samples, exact.sample_unit, exact.crossed_at_tokens) == (10, "exact laws", None)
    assert stream.sample_unit == "tokens"
    assert 0 < stream.crossed_at_tokens < stream.num_samples


def test_healthy_subject_crosses_nothing():
    """The limit is in the picture, and the path stays below it."""
    matrix = kill_matrix([replace(HARMLESS, caught_by=())], ["lossless"], plan=small_plan(500))
    assert matrix.cell("none", "lossless").crossed_at_tokens is None


def small_plan(tokens: int):
    """A plan of few tokens."""
    from specverify.kill_matrix import SMALL_PLAN

    return replace(SMALL_PLAN, lossless_tokens=tokens, first_token_samples=10)


def test_a_check_that_is_not_one_of_correctness_is_refused():
    """Its clock or its tokenizer files have no part in this."""
    assert {check.id for check in CHECKS} - {check.id for check in CORRECTNESS} == {"compatibility", "cost"}
    with pytest.raises(PlanError, match="no check of correctness named 'cost'; known: exactness"):
        kill_matrix([CAUGHT], ["cost"])


def test_a_fault_is_planted_in_the_reference_decoder_alone():
    """An engine without parts has none to change."""
    with pytest.raises(PlanError, match="'always-accept' can be planted in the reference decoder alone"):
        CAUGHT.plant(replace(small_subject(), decoder=None))


def test_a_fault_that_breaks_the_decoder_is_no_kill():
    """A crash of our own is not evidence."""

    def broken(*_):
        msg = "nothing left"
        raise InternalError(msg)

    crash = replace(HARMLESS, apply=lambda decoder: replace(decoder, stop=broken))
    (result,) = measured(crash, [check for check in CORRECTNESS if check.id == "greedy"])
    assert result.verdict is Verdict.NOT_RUN
    assert result.summary == "InternalError: nothing left"


def test_progress_is_told():
    """One unit a fault."""
    told = []

    class Watched:
        def stage(self, name, total):
            told.append((name, total))

        def advance(self, amount=1):
            told.append(amount)

        def close(self):
            told.append("closed")

    kill_matrix([CAUGHT, HARMLESS], ["greedy"], watch=Watched())
    assert told == [("faults", 2), 1, 1, "closed"]


@pytest.mark.nightly
def test_workers_change_nothing():
    """Names cross to other processes, cells come back."""
    faults = [find_fault(name) for name in ("residual-wrong-row", "eos-twice", "seed-ignored")]
    assert kill_matrix(faults, workers=2) == kill_matrix(faults)
