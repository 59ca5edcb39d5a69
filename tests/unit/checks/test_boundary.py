"""boundary: probes beside the threshold, and a second implementation on the same uniforms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specverify.checks.boundary import boundary, reference_block
from specverify.choices import Stream
from specverify.faults import find_fault
from specverify.plan import Plan
from specverify.records import CheckResult, SamplingParams, Verdict
from specverify.subject import EncodedPrompt, Subject
from specverify.verification.rules import RULES
from tests.unit.checks.hashed import VOCAB_SIZE, concluded, subject

PLAN = Plan(coupled_draws=300)


def healthy() -> Subject:
    """Hashed models, with prompts long enough for a block."""
    prompts = tuple(
        EncodedPrompt(id=f"p{n}", domain="test", token_ids=tuple((n + place) % VOCAB_SIZE for place in range(5)))
        for n in range(20)
    )
    return replace(subject(), prompts=prompts)


def under(fault: str) -> CheckResult:
    """What the check says of a planted fault."""
    well = healthy()
    return concluded(boundary, replace(well, decoder=find_fault(fault).apply(well.decoder)), PLAN)


def test_the_healthy_rule_passes_with_a_bound():
    """300 coupled steps and none different: ln(1e6) / 300."""
    result = concluded(boundary, healthy(), PLAN)
    assert result.verdict is Verdict.PASS
    assert result.num_samples == 300
    assert result.measurements["code_tv_bound"] == pytest.approx(13.8155 / 300, rel=0.05)
    right, wrong = result.plots[0].series
    assert len(right.y) == 20 * PLAN.num_speculative_tokens
    assert list(right.y) == sorted(right.y)
    assert wrong.y == ()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_p=0.9), SamplingParams(top_k=2), SamplingParams(min_p=0.5), SamplingParams(temperature=0.3)],
)
def test_the_healthy_rule_passes_whatever_the_pair_is_certified_with(params: SamplingParams):
    """A draft outside the target's support has p = 0: there is nothing below its threshold, and it must be rejected."""
    assert concluded(boundary, healthy(), replace(PLAN, params=params)).verdict is Verdict.PASS


def test_a_draft_of_probability_zero_that_is_accepted_at_zero_shows_where_filters_make_one():
    """`u <= p` differs from `u < p` at one point, and a probe lies on it."""
    well = healthy()
    wrong = replace(well, decoder=find_fault("accept-or-equal").apply(well.decoder))
    result = concluded(boundary, wrong, replace(PLAN, params=SamplingParams(top_k=2)))
    assert any("accepted just above the threshold" in finding.text for finding in result.findings)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("residual-from-target", "not drawn from [p - q]+"),
        ("residual-wrong-row", "not drawn from [p - q]+"),
        ("residual-not-clamped", "not drawn from [p - q]+"),
        ("bonus-from-draft", "bonus token is not drawn"),
        ("always-accept", "accepted just above the threshold"),
        ("ratio-inflated", "accepted just above the threshold"),
        ("ratio-square-root", "accepted just above the threshold"),
        ("greedy-verification", "rejected just below the threshold"),
    ],
)
def test_a_probe_names_the_line_that_is_wrong(fault: str, said: str):
    """Threshold, replacement or bonus."""
    result = under(fault)
    assert result.verdict is Verdict.FAIL
    assert any(said in finding.text for finding in result.findings)
    assert result.measurements["code_tv_bound"] == 1
    assert result.plots[0].series[1].y


@pytest.mark.parametrize("fault", ["draft-noise-in-accept", "draft-noise-in-residual", "accept-noise-in-residual"])
def test_noise_that_is_used_twice_shows_in_the_coupled_steps_only(fault: str):
    """The laws are right, the uniforms are not."""
    result = under(fault)
    assert result.verdict is Verdict.FAIL
    assert all("chain rejection emits" in finding.text for finding in result.findings)


def test_what_it_can_not_see_it_does_not_pass():
    """Another rule, no draft, no decoder, prompts that are too short."""
    well = healthy()
    short = tuple(replace(prompt, token_ids=prompt.token_ids[:2]) for prompt in well.prompts)
    for blind in (
        replace(well, rule="match"),
        replace(well, draft=None),
        replace(well, decoder=None),
        replace(well, prompts=short),
    ):
        assert concluded(boundary, blind, PLAN).verdict is Verdict.NOT_RUN


def test_the_reference_is_chain_rejection_by_hand():
    """p/q = 0.5 for the draft; the residual is all on id 1; u = 0.5 rejects, since it must lie strictly below."""
    p, q = np.array([[0.4, 0.6], [0.9, 0.1]]), np.array([[0.8, 0.2]])

    def emitted(accept: float) -> list[int]:
        uniforms = {stream: np.full(2, 0.95) for stream in Stream} | {Stream.ACCEPT: np.full(2, accept)}
        return reference_block(p, q, [0], uniforms)

    assert emitted(0.49) == [0, 1]
    assert emitted(0.5) == [1]


@pytest.mark.parametrize("name", [name for name, named in RULES.items() if not named.lossless])
def test_a_rule_that_is_lossy_by_design_is_failed_with_its_bias(name: str):
    """However few the samples: the bias is exact at the pair's own contexts, and no lossless rule's verdict can be had."""
    well = healthy()
    lossy = replace(well, rule=name, decoder=replace(well.decoder, rule=RULES[name].rule))
    result = concluded(boundary, lossy, PLAN)
    mean, largest = result.measurements["mean_bias_tv"], result.measurements["largest_bias_tv"]
    assert result.verdict is Verdict.FAIL
    assert 0 < mean <= largest <= 1
    assert result.summary.startswith(f"the rule '{name}' is lossy by design: after one draft")
    assert f"off by TV {mean:.3f} on average, {largest:.3f} at most" in result.summary
