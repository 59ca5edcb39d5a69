"""Each suite runs on something small, and its contenders do what they say."""

from __future__ import annotations

import itertools

import pytest
import torch

from specverify.bench.decoding import batch_suite, prompt_suite
from specverify.bench.overhead import overhead, recorded
from specverify.bench.sampler import sampler_suite
from specverify.bench.verification import BASELINE, Workload, contenders, naive, verification_suite
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.models.hashed import HashedModel
from specverify.models.transformers import TransformersModel
from specverify.records import DecodeRequest, SamplingParams
from tests.unit.models.checkpoints import VOCAB_SIZE, random_module


def ticking():
    """A second passes between any two looks."""
    return map(float, itertools.count()).__next__


def test_verification_suite():
    """Every contender beside the baseline, with rows and bytes."""
    work = Workload(vocab_size=40, batch=2)
    found, left_out = verification_suite(work, repeats=2, clock=ticking())
    assert {each.name for each in found} >= {"fused", "float64 rule", "transformers", "copy", "exponential limit"}
    assert {each.baseline for each in found} == {BASELINE, "exponential limit"}
    assert all(each.units == 22 and each.num_bytes == 22 * 40 * 4 for each in found)
    assert left_out == ("flashinfer, vLLM: need CUDA",)


def test_all_accepted_reads_every_row():
    """Its draft is the target's own, so nothing is rejected: the worst case of the fused rule."""
    ready, _ = contenders(Workload(vocab_size=40, batch=3, num_speculative_tokens=4))
    assert ready["fused, all accepted"]().num_accepted_tokens.tolist() == [4, 4, 4]


@pytest.mark.parametrize("closeness", [0.0, 1.0])
def test_the_naive_step_is_a_verification(closeness):
    """It accepts as often as the others, so its time is that of the same work."""
    work = Workload(vocab_size=12, batch=3_000, num_speculative_tokens=1, closeness=closeness)
    proposal, target = work.make()
    torch.manual_seed(0)
    accepted, _ = naive(proposal.token_ids, proposal.draft_logits, target)
    overlap = torch.minimum(target[:, 0].softmax(-1), proposal.draft_logits[:, 0].softmax(-1)).sum(-1).mean()
    assert float(accepted.double().mean()) == pytest.approx(float(overlap), abs=0.04)


def test_sampler_suite():
    """Whole steps beside the rule."""
    (found,) = sampler_suite(3, 2, repeats=2, sequences=50, clock=ticking())
    assert (found.id, found.units, found.unit) == ("sampler/V=3,g=3,2 tokens", 50, "sequences")
    assert (found.name, found.baseline) == ("whole steps looked up", "the rule on looked-up laws")


def test_decoding_suites():
    """Both arms decode the same number of tokens."""
    target, draft = HashedModel(seed=1), HashedModel(seed=2)
    decoder = Decoder(target=target, drafter=DraftModel(draft, target.vocab_size))
    (by_batch,) = batch_suite(decoder, [1, 2], batch=3, repeats=2, clock=ticking())
    (by_prompt,) = prompt_suite(decoder, [1, 2], length=5, repeats=2, clock=ticking())
    assert (by_batch.units, by_batch.unit, by_batch.baseline) == (3, "sequences", "target alone")
    assert (by_prompt.id, by_prompt.unit) == ("decoding/prompt=5", "tokens")


def test_overhead_is_what_passes_do_not_explain():
    """One prefill and one pass a step for each model that drafts one token; a second goes by inside each pass and between."""
    target, draft = (TransformersModel(random_module("llama"), name) for name in ("target", "draft"))
    decoder = Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE), num_speculative_tokens=1)
    request = DecodeRequest(
        id="r", prompt_ids=(3, 4, 5), params=SamplingParams(temperature=0, max_new_tokens=6), seed=1
    )
    for each in (decoder, recorded(decoder)):
        found = overhead(each, [request], repeats=2, clock=ticking())
        assert found["passes_per_step"] == pytest.approx((2 + 2 * 3) / 3)
        assert found["step_ms"] == pytest.approx(1e3 * found["passes_per_step"] + found["overhead_per_step_ms"])
