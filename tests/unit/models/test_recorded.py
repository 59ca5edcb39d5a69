"""Recorded passes: the bits of the same passes in Python, the tokens of the growing cache, and never a stale branch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.recorded import RecordedPasses
from specverify.models.transformers import TransformersModel
from specverify.records import DecodeRequest, SamplingParams
from tests.unit.models.checkpoints import VOCAB_SIZE, random_module
from tests.unit.models.histories import ALLOWED

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = (3, 4, 5, 6, 7)
BLOCKS = ((8, 9, 10), (11, 12, 13), (14, 15, 16))


def logits_of(model: TransformersModel) -> Tensor:
    """Of blocks of two sizes, each followed by a rollback of one token, far enough to outgrow a first buffer."""
    session, rows = model.open([PROMPT * 12]), []
    for block in BLOCKS:
        rows.append(session.append(torch.tensor([block]), torch.tensor([len(block)]))[0])
        session.rollback(session.lengths - 1)
        rows.append(session.append(torch.tensor([[19]]), torch.tensor([1]))[0])
    assert session.lengths.item() > 64
    return torch.cat(rows)


@pytest.fixture(params=["llama", "gpt2", "qwen3"])
def recordable(request: pytest.FixtureRequest) -> TransformersModel:
    """A model with full attention."""
    return TransformersModel(random_module(request.param), request.param)


def test_a_recording_gives_the_bits_of_what_it_records(recordable: TransformersModel) -> None:
    """With and without recording, over buffers of the same size; nothing fell back."""
    recorded = recordable.recorded()
    found = logits_of(recorded)
    assert torch.equal(found, logits_of(recordable.recorded(record=False)))
    torch.testing.assert_close(found, logits_of(recordable), rtol=0, atol=ALLOWED[torch.float32])
    assert recorded.passes is not None
    assert not any(each == recorded.passes._eager for each in recorded.passes._passes.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_says_the_same(temperature: float) -> None:
    """Alone, in a batch, and with the target alone; gradients are wanted afterwards as before."""
    models = [TransformersModel(random_module(name), name) for name in ("llama", "qwen3")]
    params = SamplingParams(temperature=temperature, max_new_tokens=12)
    rows = [Row(DecodeRequest(id="r", prompt_ids=PROMPT, params=params, seed=5), sample) for sample in range(2)]

    def said(target: TransformersModel, draft: TransformersModel, batch: list[Row]) -> list[tuple[int, ...]]:
        decoder = Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE))
        ways = (speculative(decoder, batch), autoregressive(decoder, batch))
        return [trace.token_ids for way in ways for trace in sorted(way, key=lambda trace: trace.sample)]

    recorded = [model.recorded() for model in models]
    assert said(*recorded, rows) == said(*models, rows)
    for row in rows:
        assert said(*recorded, [row]) == said(*models, [row])
    assert all(parameter.requires_grad for model in models for parameter in model.module.parameters())


def test_two_sessions_at_once_do_not_share_buffers(llama: TransformersModel) -> None:
    """The second gets buffers of its own; a later one gets clean ones back."""
    model = llama.recorded()
    first, second = model.open([PROMPT]), model.open([PROMPT[::-1]])
    token, one = torch.tensor([[8]]), torch.tensor([1])
    alone = [llama.open([prompt]).append(token, one) for prompt in (PROMPT, PROMPT[::-1])]
    places = []
    for _ in range(2):
        for session, expected in ((first, alone[0]), (second, alone[1])):
            torch.testing.assert_close(session.append(token, one), expected, rtol=0, atol=ALLOWED[torch.float32])
            session.rollback(session.lengths - 1)
            places.append(session._cache._layers[0].buffers[0].data_ptr())
    assert places[:2] == places[2:], "a session was moved though its buffers are large enough"
    assert places[0] != places[1]
    assert model.passes is not None
    with torch.inference_mode():
        for buffer in model.passes._rooms[64]:
            buffer[:, :, -1] = torch.nan  # as a pass that diverged leaves it
    del first, second, session
    assert model.open([PROMPT]).append(token, one).isfinite().all()


def test_a_branch_that_depends_on_the_tokens_is_not_lost(llama: TransformersModel) -> None:
    """Its recording gives other bits elsewhere, so the pass itself runs."""
    head = llama.module.lm_head.forward
    inner, seen = llama.module.model.forward, []

    def branching(*args: object, **arguments: Any) -> object:
        seen.append(int(arguments["input_ids"][0, 0]))
        return inner(*args, **arguments)

    llama.module.model.forward = branching
    llama.module.lm_head.forward = lambda states: head(states) + seen[-1] % 2
    session = replace(llama, passes=RecordedPasses(llama.module)).open([PROMPT])
    rows = [session.append(torch.tensor([[token]]), torch.tensor([1]))[0] for token in (8, 9)]
    del llama.module.lm_head.forward, llama.module.model.forward
    expected = llama.logits([[*PROMPT, 8], [*PROMPT, 8, 9]])
    torch.testing.assert_close(rows[0][0], expected[0, 5], rtol=0, atol=ALLOWED[torch.float32])
    torch.testing.assert_close(rows[1][0], expected[1, 6] + 1, rtol=0, atol=ALLOWED[torch.float32])


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3"])
def test_what_counts_slots_is_left_as_it_is(architecture: str) -> None:
    """A window is not in the mask of a recorded pass."""
    model = TransformersModel(random_module(architecture), architecture)
    assert model.recorded() is model


def test_a_recording_that_writes_where_the_pass_does_not_is_not_used(
    llama: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the right logits and the right slots, and leaves a stray key at the place where it was recorded."""

    def straying(run: Any, token_ids: Tensor, start: Tensor, buffers: list[Tensor]) -> Any:
        del token_ids

        def replay(ids: Tensor, here: Tensor, *held: Tensor) -> Tensor:
            buffers[0][:, :, int(start)] = 1.0
            return run(ids, here, *held)

        return replay

    monkeypatch.setattr("specverify.models.recorded._trace", straying)
    model = llama.recorded()
    model.open([PROMPT]).append(torch.tensor([[8]]), torch.tensor([1]))
    assert model.passes is not None
    assert all(each == model.passes._eager for each in model.passes._passes.values())
