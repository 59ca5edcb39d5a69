"""A thousand runs without a fault: none is failed, and every test alarms as rarely as it promises."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from specverify.calibrate import calibrate
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.records import Verdict

NUM_RUNS = int(os.environ.get("SPECVERIFY_NULL_RUNS", "1000"))
PLAN = replace(
    SMALL_PLAN, lossless_tokens=300, first_token_samples=60, batch_size=32, greedy_prompts=2, two_arms_tokens=150,
    largest_undetected_shift=1.0, only=("lossless", "acceptance", "greedy", "two-arms"),
)  # fmt: skip


@pytest.mark.nightly
def test_a_thousand_healthy_runs():
    """The models of 24 ids, streams of 300 tokens, two arms of 150."""
    calibration = calibrate(small_subject(), PLAN, runs=NUM_RUNS)
    said = [
        f"{one.check_id}: {one.test} {one.num_alarms}/{one.num_runs} at {one.promised}" for one in calibration.promises
    ]
    print("\n".join(said))  # noqa: T201 - the figures of a night
    assert calibration.num_failed == 0
    assert not [one for one in calibration.promises if one.verdict is Verdict.FAIL], said
