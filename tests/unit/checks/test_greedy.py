"""greedy: the gap rule, the rate of flips, ties, and the target as its own draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specverify.certify import run_check
from specverify.checks.greedy import _noise_tests, greedy
from specverify.checks.noise import Noise
from specverify.checks.self_speculation import self_speculation
from specverify.faults import find_fault
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.records import Verdict
from specverify.scoring import ScoredTraces

HEALTHY = small_subject()
NOISE = Noise(largest=1.0, margin_sd=0.1, num_positions=100)


def tokens(gap: np.ndarray, margin: np.ndarray) -> ScoredTraces:
    """Columns of a stream."""
    return ScoredTraces((), {"token": np.zeros(len(gap)), "gap": gap, "margin": margin})


def p_values(gap: np.ndarray, margin: np.ndarray) -> list[float]:
    """Of the flips, and of those beyond 6s."""
    return [test.p_value for test in _noise_tests(SMALL_PLAN, tokens(gap, margin), gap > 0, NOISE)]


def test_healthy_decoder_passes_and_accepts_its_own_drafts():
    """Every draft of the target is accepted by the target."""
    result = run_check(greedy, HEALTHY, SMALL_PLAN)
    assert result.verdict is Verdict.PASS, result.summary
    assert result.measurements["self_speculation_acceptance"] == 1
    assert result.measurements["num_ties_to_higher_id"] == 0


def test_one_flip_beyond_6s_is_no_proof_and_two_are():
    """2B is ten times as wide: a fault inside it is found by its number."""
    margin = np.full(500, 3.0)
    gap = np.zeros(500)
    gap[0] = 0.7
    assert p_values(gap, margin)[1] > 1e-7
    gap[1] = 0.7
    assert p_values(gap, margin)[1] < 1e-12


def test_flips_follow_their_margins():
    """Of 500 exact ties half may flip; of 500 clear choices none."""
    flipped = np.concatenate((np.full(260, 0.05), np.zeros(240)))
    assert p_values(flipped, np.zeros(500))[0] > 0.01
    assert p_values(flipped, np.full(500, 0.5))[0] < 1e-100


def test_the_rate_of_flips_has_its_size():
    """Gaussian noise on uniform margins is rejected at most at its rate."""
    rng, rejected = np.random.default_rng(4), 0
    for _ in range(200):
        margin = rng.random(200)
        flips = rng.normal(size=200) * NOISE.margin_sd > margin
        rejected += p_values(np.where(flips, 0.01, 0.0), margin)[0] <= 0.05
    assert rejected <= 22  # more has a chance of 1e-4 at a rate of 0.05


@pytest.mark.parametrize("name", ["last-draft-never-accepted", "accept-next-row"])
def test_a_verifier_that_rejects_its_own_drafts_is_found(name: str):
    """Whatever the draft model is."""
    control = self_speculation(find_fault(name).plant(HEALTHY), SMALL_PLAN)
    assert control.measurements()["self_speculation_acceptance"] < 1
    assert control.findings(replace(NOISE, largest=0.0))


def test_the_control_is_of_chains_of_the_reference_decoder():
    """Nothing is claimed of what can't be asked."""
    control = self_speculation(replace(HEALTHY, decoder=None), SMALL_PLAN)
    assert control.measurements() == {}
    assert control.findings(NOISE) == ()
