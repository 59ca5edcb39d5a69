"""A thousand runs without a fault: none is failed, and every test alarms as rarely as it promises."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from specverify.calibrate import Counted, calibrate
from specverify.cli.kept import measurement_key, read_kept, write_kept
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.records import Verdict
from specverify.watch import Silent

NUM_RUNS = int(os.environ.get("SPECVERIFY_NULL_RUNS", "1000"))
PLAN = replace(
    SMALL_PLAN, lossless_tokens=300, first_token_samples=60, batch_size=32, greedy_prompts=2, two_arms_tokens=150,
    parameter_tokens=96, largest_undetected_shift=1.0, largest_undetected_shift_per_setting=1.0,
)  # fmt: skip
"""The models of 24 ids, streams of 300 tokens, two arms of 150, 96 tokens at each setting."""
HALVES = (("lossless", "acceptance", "greedy", "two-arms"), ("reproducibility", "parameters"))
"""Every check that reports a p-value or an e-value; each half is judged with the whole error budget."""


class Counting(Silent):
    """Says how far a night has come."""

    done = 0

    def advance(self, amount: int = 1) -> None:
        """One more."""
        self.done += amount
        if not self.done % 50:
            print(self.done, flush=True)  # noqa: T201 - the log of a night


@pytest.mark.nightly
@pytest.mark.parametrize("checks", HALVES, ids=" ".join)
def test_a_thousand_healthy_runs(checks):
    """`SPECVERIFY_NULL_RUNS` says how many, if not a thousand; with a folder in `SPECVERIFY_NULL_RUNS_OUT` it goes on where it was."""
    subject, plan = small_subject(), replace(PLAN, only=checks)
    folder = os.environ.get("SPECVERIFY_NULL_RUNS_OUT")
    path = Path(folder, f"{'+'.join(checks)}.json") if folder else None
    counted = read_kept(path, Counted(key=measurement_key(subject, plan)))
    calibration = calibrate(
        subject, plan, runs=NUM_RUNS, counted=counted, keep=lambda now: write_kept(path, now), watch=Counting()
    )
    said = [
        f"{one.check_id}: {one.test} {one.num_alarms}/{one.num_runs} at {one.promised}" for one in calibration.promises
    ]
    print("\n".join([f"{calibration.num_failed} of {NUM_RUNS} runs failed", *said]))  # noqa: T201 - its figures
    assert calibration.num_failed == 0
    assert not [one for one in calibration.promises if one.verdict is Verdict.FAIL], said
