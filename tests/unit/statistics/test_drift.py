"""The drift alarm: as rare as it promises while nothing has fallen, and prompt when something has."""

from __future__ import annotations

import numpy as np
import pytest

from specverify.errors import InternalError
from specverify.statistics.drift import acceptance_drift

BASELINE = 0.7


def prompts(mean: float, number: int, seed: int) -> np.ndarray:
    """Acceptance of prompts: a beta law of that mean, with the spread that was measured."""
    return np.random.default_rng(seed).beta(20 * mean, 20 * (1 - mean), number)


def test_false_alarms_are_as_rare_as_promised():
    """Runs of 500 prompts at the baseline itself, the hardest healthy case: at most 500 / 10,000 of them, and noise."""
    alarms = sum(
        acceptance_drift(prompts(BASELINE, 500, seed), baseline=BASELINE).first_alarm is not None for seed in range(300)
    )
    assert alarms <= 300 * 0.05 + 3 * (300 * 0.05 * 0.95) ** 0.5


def test_the_promise_is_about_any_law():
    """Prompts accepted either wholly or not at all have the largest spread, and keep the promise."""
    generator = np.random.default_rng(1)
    runs = (generator.random((300, 500)) < BASELINE).astype(float)
    alarms = sum(acceptance_drift(run, baseline=BASELINE).first_alarm is not None for run in runs)
    assert alarms <= 300 * 0.05 + 3 * (300 * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize(("fall", "within"), [(0.05, 600), (0.1, 250), (0.3, 80)])
def test_a_fall_is_seen_in_time(fall: float, within: int):
    """After 200 healthy prompts; the larger the sooner. The study's median delays: 194 at 0.05, 70 at 0.1."""
    delays = []
    for seed in range(20):
        stream = np.concatenate((prompts(BASELINE + 0.01, 200, seed), prompts(BASELINE - fall, 1_500, 100 + seed)))
        first = acceptance_drift(stream, baseline=BASELINE).first_alarm
        delays.append(np.inf if first is None else first - 200)
    assert np.median(delays) < within


def test_a_rise_is_no_alarm():
    """More acceptance costs nobody anything here; `acceptance` asks whether it is lawful."""
    assert acceptance_drift(prompts(0.9, 5_000, 0), baseline=BASELINE).first_alarm is None


@pytest.mark.parametrize("wrong", [[1.1], [-0.1], [np.nan]])
def test_values_outside_the_unit_interval_are_refused(wrong: list[float]):
    """Counts divided the wrong way round would be."""
    with pytest.raises(InternalError, match="must lie in"):
        acceptance_drift(np.array(wrong), baseline=BASELINE)
