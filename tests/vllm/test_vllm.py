"""What `qualify` says of vLLM's rejection sampler, and that it would say so of a wrong one; `tox -e vllm`."""

from __future__ import annotations

import pytest

from specverify.qualify import qualify
from specverify.records import Verdict
from tests.vllm.emulator import installed, sampler

pytestmark = pytest.mark.skipif(installed() is None, reason="no wheel of vLLM is installed; tox -e vllm has one")


def test_only_a_uniform_of_exactly_0_lets_the_impossible_through():
    """Every claim holds on every path, but `support`: it compares p / q >= u, with uniforms of 53 bits."""
    found = qualify(sampler(), name="vllm")
    verdicts = {claim.id: claim.verdict for claim in found.claims}
    assert verdicts.pop("support") is Verdict.FAIL
    assert set(verdicts.values()) == {Verdict.PASS}, verdicts
    (support,) = (claim for claim in found.claims if claim.id == "support")
    assert "1.11e-16" in support.summary


FAULTS = {
    "acceptance": (">= uniform_prob", ">= 0.9 * uniform_prob"),
    "residual": ("tl.maximum(target_prob - draft_prob, 0.0)", "target_prob"),
    "rows": ("tl.load(bonus_token_ids_ptr + req_idx)", "tl.load(bonus_token_ids_ptr)"),
}


@pytest.mark.parametrize("claim_id", FAULTS)
def test_a_line_that_is_wrong_is_blamed(claim_id):
    """A threshold a tenth too low, a residual that subtracts nothing, the first row's bonus for all."""
    found = qualify(sampler(*FAULTS[claim_id]), name="vllm")
    (blamed,) = (claim for claim in found.claims if claim.id == claim_id)
    assert blamed.verdict is Verdict.FAIL, blamed.summary
