"""What must be the same on CUDA as on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specverify.bench.verification import BASELINE, Workload, verification_suite
from specverify.choices.philox import uniform53
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.models.transformers import TransformersModel
from specverify.records import DecodeRequest, SamplingParams

pytestmark = pytest.mark.gpu


def test_philox_has_the_same_bits():
    """A uniform is a function of its coordinates, on any device."""
    coordinates = [torch.arange(1_000) * step for step in (7_919, 1, 3, 5, 11)]
    on_cpu = uniform53(*coordinates)
    assert torch.equal(on_cpu, uniform53(*(each.cuda() for each in coordinates)).cpu())


def test_greedy_speculation_changes_no_token():
    """A small random Llama with a worse draft, fp32."""

    def model(seed: int) -> TransformersModel:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        return TransformersModel(LlamaForCausalLM(config).cuda(), f"random {seed}")

    target = model(0)
    engine = ReferenceEngine(Decoder(target=target, drafter=DraftModel(model(1), 64)))
    params = SamplingParams(temperature=0, max_new_tokens=24)
    requests = [
        DecodeRequest(id=f"{n}", prompt_ids=tuple(range(1, 3 + n)), params=params, speculation=on)
        for n in range(4)
        for on in (True, False)
    ]
    texts = [trace.token_ids for trace in engine.decode(requests)]
    assert texts[0::2] == texts[1::2]


def test_a_cuda_graph_gives_the_bits_of_the_pass_that_it_captures():
    """One row through rollbacks and two capacities, in fp32; nothing fell back to Python."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    plain = TransformersModel(LlamaForCausalLM(config).cuda(), "random")
    found = {}
    for record in (True, False):
        model = plain.recorded(record=record)
        session, rows = model.open([range(1, 60)]), []
        for block in ([3, 4, 5], [6], [7, 8, 9]) * 2:
            rows.append(session.append(torch.tensor([block], device="cuda"), torch.tensor([len(block)]))[0])
            session.rollback(session.lengths - 1)
        found[record] = torch.cat(rows)
        passes = model.passes._passes.values()
        assert any(each == model.passes._eager for each in passes) is not record
    assert torch.equal(found[True], found[False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_step_is_faster_than_what_is_written_first(dtype, record_property):
    """64 sequences of 128,256 ids; the aims over copy rate and flashinfer (design/performance.md) are recorded, not gated."""
    pytest.importorskip("triton", reason="the fused rule on CUDA is written in it")
    found, _ = verification_suite(Workload(vocab_size=128_256, batch=64, dtype=dtype, device="cuda"), repeats=30)
    for each in found:
        record_property(f"{each.name} over {each.baseline}", each.ratio.estimate)
    fused = next(each for each in found if (each.name, each.baseline) == ("fused, all accepted", BASELINE))
    assert fused.ratio.low > 1
