"""lossless: when the stream is long enough, and what it bounds."""

from __future__ import annotations

import numpy as np
import pytest

from specverify.checks.evidence import positive_statements
from specverify.checks.lossless import lossless
from specverify.judge import judge
from specverify.plan import Plan
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, FinishReason, SamplingParams, Verdict
from specverify.scoring import ScoredTraces
from specverify.statistics.interval import mixture_share_bound
from tests.unit.checks.hashed import concluded, subject

PLAN = Plan(lossless_tokens=1_000, largest_undetected_shift=0.5)


def stream(num_tokens: int, log10_e: float, *, grows_for: int = 1_000) -> ScoredTraces:
    """A stream whose one bet has reached 10^log10_e after `grows_for` tokens, and then stands still."""
    request = DecodeRequest(id="lossless/0/p", prompt_ids=(1,), params=SamplingParams(max_new_tokens=1))
    steps = (DecodeStep(1, 1, 1),)
    trace = DecodeTrace(request=request, sample=0, token_ids=(1,), finish=FinishReason.LENGTH, steps=steps)
    ratio = np.ones(num_tokens)
    ratio[:grows_for] = 10 ** ((log10_e + np.log10(3)) / grows_for)  # a third of the capital bets on this ratio
    columns = {"trace": np.zeros(num_tokens), "token": np.ones(num_tokens), "prob": np.full(num_tokens, 0.5)}
    return ScoredTraces((trace,), columns, {"a fault": ratio})


@pytest.mark.parametrize(
    ("num_tokens", "log10_e", "decided"),
    [
        (999, 0.0, False),
        (1_000, 0.0, True),
        (1_000, 2.9, True),
        (1_000, 3.2, False),
        (9_999, 3.2, False),
        (10_000, 3.2, True),
        (1_000, 9.0, True),
    ],
)
def test_a_suspicion_asks_for_ten_times_the_tokens(num_tokens: int, log10_e: float, decided: bool):
    """Without one the number that was fixed before is enough; proof ends it at once."""
    assert lossless.decided(PLAN, stream(num_tokens, log10_e)) is decided


def test_a_suspicion_that_stays_is_no_pass():
    """Nor is it proof: the verdict says what the evidence is."""
    result = lossless.conclude(subject(), PLAN, stream(10_000, 3.2))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "suspect: evidence 10^3.2 to 1" in result.summary
    assert result.num_samples == 10_000


def test_proof_is_said_once_and_says_what_to_do():
    """The judge's FAIL keeps the check's advice, and names the evidence one time."""
    (result,), _ = judge([lossless.conclude(subject(), PLAN, stream(1_000, 9.0))], PLAN.false_fail_rate)
    assert result.verdict is Verdict.FAIL
    assert result.summary.count("evidence 10^9.0 to 1") == 1
    assert result.summary.endswith("; 1,000 tokens of 16 prompts")
    assert "--only exactness" in result.advice


def test_a_suspicion_that_goes_away_is_a_pass_over_all_tokens():
    """A bet that loses after the fixed number pays back."""
    scored = stream(10_000, 3.2)
    scored.fault_ratios["a fault"][1_000:] = 0.99
    result = lossless.conclude(subject(), PLAN, scored)
    assert result.verdict is Verdict.PASS
    assert "10,000 tokens" in result.summary


def test_the_bounds_hold_for_a_healthy_decoder_and_are_not_idle():
    """They are reported with the verdict, and are below 1."""
    result = concluded(lossless, subject(), Plan(lossless_tokens=1_500, first_token_samples=50, max_new_tokens=16))
    assert 0.05 < result.measurements["kolmogorov_distance_bound"] < 0.2
    assert 0 <= result.measurements["draft_leak_bound"] < 1
    assert positive_statements(stream(10, 0.0), PLAN) == {}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_leak_bound_covers_the_share_and_falls_with_the_samples(share: float):
    """Tokens from a mixture: the bound lies above its share, and comes down to it."""
    generator = np.random.default_rng(3)
    n, expected, lift = 100_000, 0.4, 0.3
    hits = generator.random(n) < expected + share * lift
    bounds = [
        mixture_share_bound(hits[:m], np.full(m, expected), np.full(m, lift), false_pass_rate=1e-6) for m in (10_000, n)
    ]
    assert share < bounds[1] < bounds[0]
    assert bounds[1] < share + 0.06
    assert mixture_share_bound(hits, np.full(n, expected), np.zeros(n), false_pass_rate=1e-6) == 1
