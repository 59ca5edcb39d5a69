"""Models of transformers behind the protocol: prompts, blocks, limits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specverify
from specverify.errors import NonFiniteLogits, PairError, PromptError, UnsupportedModel
from specverify.models.kv_cache import MaskedCache
from specverify.models.transformers import UNBOUNDED_LENGTH, TransformersModel, require_working_rollback
from tests.unit.models.checkpoints import VOCAB_SIZE, random_module
from tests.unit.models.histories import ALLOWED, difference, worst_difference


def test_prompts_of_different_lengths_equal_single_ones(model: TransformersModel) -> None:
    """What shares a batch with a prompt doesn't change its logits."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [1], [2, 3, 4]]
    together = model.open(prompts).append(torch.tensor([[13], [14], [15]]), torch.tensor([1, 1, 1]))
    for index, prompt in enumerate(prompts):
        alone = model.open([prompt]).append(torch.tensor([[13 + index]]), torch.tensor([1]))
        torch.testing.assert_close(together[index], alone[0], rtol=0, atol=ALLOWED[torch.float32])


def test_an_empty_prompt_is_an_empty_row(model: TransformersModel) -> None:
    """A row may start with nothing, alone or beside others."""
    for prompts in ([[]], [[], [4, 5, 6]], [[], []]):
        session = model.open(prompts)
        assert session.lengths.tolist() == [len(prompt) for prompt in prompts]
        logits = session.append(torch.full((len(prompts), 1), 3), torch.ones(len(prompts), dtype=torch.int64))
        rows = [[*prompt, 3] for prompt in prompts]
        assert difference(model, logits, rows, [1] * len(rows)) < ALLOWED[torch.float32]


def test_duplicated_rows_go_their_own_ways(model: TransformersModel) -> None:
    """Samples that share a prompt are prefilled once, then part."""
    session = model.open([[1, 2, 3], [4]])
    session.select(torch.tensor([0, 1, 0]))
    logits = session.append(torch.tensor([[5, 6], [7, 0], [8, 0]]), torch.tensor([2, 1, 1]))
    rows = [[1, 2, 3, 5, 6], [4, 7], [1, 2, 3, 8]]
    assert difference(model, logits, rows, [2, 1, 1]) < ALLOWED[torch.float32]


def test_all_rows_can_leave(llama: TransformersModel) -> None:
    """A batch in which every row has ended is empty, and stays usable."""
    session = llama.open([[1, 2], [3]])
    session.select(torch.tensor([], dtype=torch.int64))
    assert session.lengths.tolist() == []
    assert session.append(torch.zeros(0, 1, dtype=torch.int64), session.lengths).shape == (0, 1, VOCAB_SIZE)


def test_a_block_without_tokens_costs_no_forward_pass(llama: TransformersModel) -> None:
    """Nothing to append, nothing to run; the shape is kept."""
    session = llama.open([[1, 2], [3]])
    calls = []
    llama.module.register_forward_hook(lambda *_: calls.append(1))
    logits = session.append(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 0]))
    assert not calls
    assert logits.shape == (2, 3, VOCAB_SIZE)
    assert session.lengths.tolist() == [2, 1]


def test_a_block_wider_than_its_tokens_keeps_its_shape(llama: TransformersModel) -> None:
    """Columns that no row uses are not run, and come back undefined."""
    session = llama.open([[1, 2], [3]])
    logits = session.append(torch.tensor([[4, -1, -1], [5, 6, 10**9]]), torch.tensor([1, 2]))
    assert logits.shape == (2, 3, VOCAB_SIZE)
    assert difference(llama, logits, [[1, 2, 4], [3, 5, 6]], [1, 2]) < ALLOWED[torch.float32]


def test_lengths_are_a_copy(llama: TransformersModel) -> None:
    """A caller that keeps `lengths` and edits it doesn't edit the session."""
    session = llama.open([[1, 2]])
    session.lengths.add_(5)
    assert session.lengths.dtype is torch.int64
    assert session.lengths.tolist() == [2]


def test_logits_without_a_cache_are_those_of_each_sequence_alone(model: TransformersModel) -> None:
    """Padding on the right is invisible."""
    sequences = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [], [10, 11]]
    logits = model.logits(sequences)
    assert logits.shape == (4, 9, model.vocab_size)
    for index, sequence in enumerate(sequences):
        if sequence:
            alone = model.logits([sequence])[0]
            torch.testing.assert_close(logits[index, : len(sequence)], alone, rtol=0, atol=ALLOWED[torch.float32])
    assert model.logits([[]]).shape == (1, 0, model.vocab_size)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_raise_with_row_and_position(value: float) -> None:
    """The message names the model, the row and the position; -inf alone is a legal logit."""
    module = random_module("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = value
    model = TransformersModel(module, "broken")
    with pytest.raises(NonFiniteLogits, match=r"broken returned NaN after token 0 \(counted from 0\) of row 1"):
        model.logits([[1, 2, 3], [7]])
    session = model.open([[1], [2, 3]])
    with pytest.raises(NonFiniteLogits, match=r"broken returned NaN after token 2 \(counted from 0\) of row 1"):
        session.append(torch.tensor([[4, 0], [7, 5]]), torch.tensor([1, 2]))


def test_infinite_logits_raise_and_minus_infinity_does_not() -> None:
    """+inf leaves no distribution; -inf is how a token is forbidden."""
    model = TransformersModel(random_module("llama"), "biased")
    model.module.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE), requires_grad=False)
    model.module.lm_head.bias[3] = -torch.inf
    assert model.logits([[1]])[0, 0, 3] == -torch.inf
    model.module.lm_head.bias[3] = torch.inf
    with pytest.raises(NonFiniteLogits, match=r"returned \+inf after token 0"):
        model.logits([[1]])


@pytest.mark.parametrize("token", [VOCAB_SIZE, 10**6, -1])
def test_an_id_without_an_embedding_is_a_prompt_error(llama: TransformersModel, token: int) -> None:
    """In a prompt, a sequence or a block; never an IndexError or a device-side assert."""
    with pytest.raises(PromptError, match=f"row 1 contains id {token}"):
        llama.open([[1, 2], [3, token]])
    with pytest.raises(PromptError, match=f"row 0 contains id {token}"):
        llama.logits([[token]])
    session = llama.open([[1], [2]])
    with pytest.raises(PromptError, match=f"row 0 contains id {token}"):
        session.append(torch.tensor([[token], [1]]), torch.tensor([1, 1]))


def test_more_tokens_than_positions_is_a_prompt_error() -> None:
    """GPT-2 has no embedding there, and a rotary model was never trained there."""
    model = TransformersModel(random_module("gpt2"), "gpt2")
    assert model.max_length == 256
    with pytest.raises(PromptError, match="positions for 256 tokens, but row 0 would hold 257"):
        model.open([[1] * 257])
    session = model.open([[1] * 256, [2]])
    with pytest.raises(PromptError, match="row 0 would hold 257"):
        session.append(torch.tensor([[1], [1]]), torch.tensor([1, 1]))
    logits = session.append(torch.tensor([[0, 0], [1, 2]]), torch.tensor([0, 2]))  # unused entries need no position
    assert difference(model, logits, [[], [2, 1, 2]], [0, 2]) < ALLOWED[torch.float32]


def test_figures_of_a_model(llama: TransformersModel) -> None:
    """Sizes come from the layers, not from the tokenizer."""
    assert llama.vocab_size == llama.num_embeddings == VOCAB_SIZE
    assert llama.num_parameters == sum(parameter.numel() for parameter in llama.module.parameters())
    assert llama.memory_bytes >= 4 * llama.num_parameters
    assert llama.max_length == 256
    assert llama.device == torch.device("cpu")
    llama.module.resize_token_embeddings(40)
    assert TransformersModel(llama.module, "padded").vocab_size == 40


def test_a_configuration_without_a_length_has_none() -> None:
    """ALiBi models state none; the number stays small enough for int64 arithmetic."""
    config = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=VOCAB_SIZE)
    model = TransformersModel(AutoModelForCausalLM.from_config(config), "bloom")
    assert model.max_length == UNBOUNDED_LENGTH
    assert worst_difference(model, seed=1) < ALLOWED[torch.float32]


def test_a_model_in_training_mode_is_put_in_evaluation_mode() -> None:
    """Dropout would make every pass differ."""
    module = random_module("gpt2").train()
    assert not TransformersModel(module, "gpt2").module.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_cache_that_is_not_kept_right_is_noticed_by_running_it(
    monkeypatch: pytest.MonkeyPatch, role: str, dtype: torch.dtype
) -> None:
    """The probe of `load_model` lets the embedded models through, and refuses a rollback that leaves traces.

    On trained models the traces are several times smaller than on random ones, so these are what it must see.
    """
    folder = Path(specverify.__file__).parent / "pairs" / "embedded" / role
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the embedded pair is not there yet")
    model = TransformersModel(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), role)
    require_working_rollback(model)
    monkeypatch.setattr(MaskedCache, "rollback", lambda self, lengths: setattr(self, "lengths", lengths.copy()))
    with pytest.raises(UnsupportedModel, match=f"{role} gives other logits after a rollback than without a cache"):
        require_working_rollback(model)


def test_running_out_of_memory_is_one_sentence(llama: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which batch was too large and what to do."""

    def forward(**_: object) -> None:
        msg = "CUDA out of memory"
        raise torch.OutOfMemoryError(msg)

    monkeypatch.setattr(llama.module, "forward", forward)
    with pytest.raises(PairError, match="llama ran out of memory on cpu with 2 rows of 3 tokens; use a smaller batch"):
        llama.logits([[1, 2, 3], [4]])


def test_nothing_is_printed_and_nothing_warns(
    model: TransformersModel, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Neither the renamed cache argument nor padding makes transformers speak up."""
    session = model.open([[1, 2, 3], [4]])
    session.append(torch.tensor([[5, 6], [7, 0]]), torch.tensor([2, 1]))
    session.rollback(torch.tensor([3, 2]))
    session.append(torch.tensor([[5], [7]]), torch.tensor([1, 1]))
    assert not [warning for warning in recwarn if "transformers" in warning.filename]
    assert capfd.readouterr() == ("", "")
