"""What the sampled checks say before the judge: the edge of the support, and how much would have gone unseen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specverify.checks.evidence import detectable_shift, impossible, in_doubt, support, tokens_needed
from specverify.checks.lossless import lossless
from specverify.checks.parameters import parameters
from specverify.plan import Plan
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, Verdict
from specverify.sampling import probabilities
from specverify.scoring import ScoredTraces, _distance_to_support, score
from tests.unit.checks.hashed import VOCAB_SIZE, HashedModel, concluded, subject

PLAN = Plan(max_new_tokens=16)
NO_ROUNDING = subject()
ROUNDING = subject(rounding=0.05)


def outside(params: SamplingParams, *, rank: int) -> ScoredTraces:
    """One text of one token, the target's choice number `rank`."""
    target = HashedModel()
    token = int(target.row((1, 2)).argsort(descending=True)[rank])
    request = DecodeRequest(id="parameters/top_k/p", prompt_ids=(1, 2), params=replace(params, max_new_tokens=1))
    trace = DecodeTrace(request=request, sample=0, token_ids=(token,), finish=FinishReason.LENGTH)
    return score([trace], target=target)


def test_the_edge_is_how_far_the_logit_would_have_to_rise():
    """Inside it is 0; a rank below the cut it is the gap to the last that is in; a ban is lifted by nothing."""
    row = HashedModel().row((1, 2)).sort(descending=True).values
    inside, below = (outside(SamplingParams(top_k=3), rank=rank)["edge"][0] for rank in (2, 3))
    assert inside == 0
    assert below == pytest.approx(float(row[2] - row[3]), rel=0.05)
    banned = int(HashedModel().row((1, 2)).argmax())
    assert outside(SamplingParams(banned_token_ids=((banned,),)), rank=0)["edge"][0] == np.inf


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}]), st.floats(1e-3, 0.5))
def test_what_noise_alone_brings_in_lies_within_twice_its_size(seed: int, cut: dict, size: float):
    """Whatever token another engine may emit whose logits are off by B at most is found at an edge of 2B at most."""
    random = torch.Generator().manual_seed(seed)
    logits = (4 * torch.rand((1, 1, 16), generator=random, dtype=torch.float64)).round(decimals=1)  # ties, too
    noise = size * (2 * torch.rand(logits.shape, generator=random, dtype=torch.float64).round() - 1)
    params = SamplingParams(**cut, max_new_tokens=1)
    ids, length = torch.tensor([[1, 2]]), torch.tensor([[2]])
    laws = [
        probabilities(each, [params], token_ids=ids, prefix_lengths=length, prompt_lengths=length[0])[0, 0]
        for each in (logits, logits + noise)
    ]
    request = DecodeRequest(id="r", prompt_ids=(1, 2), params=params)
    for token in ((laws[0] == 0) & (laws[1] > 0)).nonzero()[:, 0].tolist():
        trace = DecodeTrace(request=request, sample=0, token_ids=(token,), finish=FinishReason.LENGTH)
        where = {name: torch.tensor([value]) for name, value in (("row", 0), ("position", 0), ("token", token))}
        (edge,) = _distance_to_support(laws[0][[token]], logits[0], where, [trace]).tolist()
        assert 0 < edge <= 2 * size * 1.03 + 1e-5


def test_a_token_outside_the_support_is_proof_where_nothing_moves():
    """The hashed target has no noise, so a rank below the cut is a violation however near."""
    found = support(NO_ROUNDING, PLAN, outside(SamplingParams(top_k=3), rank=3))
    assert [finding.severity for finding in found.findings] == [Verdict.FAIL]
    assert impossible(outside(SamplingParams(banned_token_ids=((int(HashedModel().row((1, 2)).argmax()),),)), rank=0))


def test_within_the_measured_noise_it_is_counted_and_left_out():
    """Half precision moves the cut; too many such tokens leave the support untested."""
    scored = outside(SamplingParams(top_k=3), rank=3)
    scored.columns["edge"][:] = 1e-3
    found = support(ROUNDING, PLAN, scored)
    assert [finding.severity for finding in found.findings] == [Verdict.PASS]
    assert (len(found.inside), found.share_at_edge, found.settled) == (0, 1.0, False)


@pytest.mark.parametrize("tokens", [500, 5_000])
def test_the_tokens_that_are_named_are_enough(tokens: int):
    """And a tenth fewer are not."""
    needed = tokens_needed(detectable_shift(tokens, PLAN), PLAN)
    assert 0.99 * tokens <= needed <= tokens


def test_too_few_tokens_are_no_pass():
    """The verdict names the size that would go unseen, and the number to set."""
    short = Plan(lossless_tokens=300, first_token_samples=20, max_new_tokens=16, parameter_tokens=32)
    for check, key in ((lossless, "lossless_tokens = "), (parameters, "parameter_tokens = ")):
        result = concluded(check, subject(), short)
        assert result.verdict is Verdict.INCONCLUSIVE
        assert key in result.summary
    assert VOCAB_SIZE > 16


def test_doubt_begins_at_a_suspicion():
    """What comes before the judge may be proof: a cell of the OFF arm then speaks of the engine without speculation."""
    from specverify.conformance.cells import _off

    told = concluded(lossless, subject(), replace(Plan(), lossless_tokens=64, seed=3))
    calm, suspect = (
        replace(told, tests=tuple(replace(t, log10_e=e) for t in told.tests if t.log10_e is not None))
        for e in (0.0, 9.0)
    )
    assert not in_doubt(replace(calm, verdict=Verdict.PASS))
    for doubtful in (suspect, replace(calm, verdict=Verdict.FAIL)):
        assert in_doubt(doubtful)
        assert _off(doubtful).advice.startswith("mend the adapter")
