"""Loading: what comes back, and one sentence for each way in which it can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specverify.errors import PairError, UnsupportedModel, UsageError
from specverify.models.loading import load_model, load_pair, resolve_device, weight_files
from tests.unit.models.checkpoints import random_module

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def _edit(file: Path, **changes: object) -> None:
    value = json.loads(file.read_text())
    value.update(changes)
    file.write_text(json.dumps(value))


def test_a_folder_loads_in_the_dtype_asked_for_without_a_word(
    folder: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Files in fp16 are computed in fp32; evaluation mode; nothing on the terminal, no warning."""
    loaded = load_model(folder)
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)
    assert loaded.source == str(folder) == loaded.model.name
    assert loaded.model.dtype is torch.float32
    assert not loaded.model.module.training
    assert loaded.config.model_type == "llama"
    assert loaded.generation_config is not None
    assert loaded.tokenizer.decode([3]) == "w3"
    assert load_model(str(folder), dtype="bfloat16").model.logits([[1]]).dtype is torch.bfloat16


def test_a_pair_is_a_target_and_perhaps_a_draft(folder: Path) -> None:
    """Both are loaded in the same way."""
    assert load_pair(folder).draft is None
    pair = load_pair(folder, folder, dtype="float64")
    assert pair.draft is not None
    assert pair.draft.model.dtype is pair.target.model.dtype is torch.float64


def test_sharded_weights_load_and_are_listed_by_name(folder: Path) -> None:
    """A large model comes in several files and an index."""
    (folder / "model.safetensors").unlink()
    random_module("llama").save_pretrained(folder, max_shard_size="20KB")
    files = weight_files(folder)
    assert len(files) > 1
    assert files == sorted(files)
    assert load_model(folder).model.logits([[1]]).shape == (1, 1, 31)
    files[1].unlink()
    with pytest.raises(PairError, match=f"lacks the weight file {files[1].name}"):
        load_model(folder)


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _drop_the_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _bring_code(folder: Path) -> None:
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    _edit(folder / "config.json", model_type="own", auto_map=names)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (shutil.rmtree, "does not exist; check the path"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; give the folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "does not know; upgrade transformers"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (_drop_the_tokenizer, "has no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "the tokenizer of .* can't be read"),
        (_truncate, "truncated or corrupt .*; copy or download it again"),
        (_lfs_pointer, "run git lfs pull"),
        (_pickle, "has pickled weights only .*; convert them .* in a place that you trust"),
        (_drop_a_tensor, r"lacks 1 of its weights \(the first is model\.layers\.1\.mlp\.up_proj\.weight\)"),
        (lambda folder: _edit(folder / "config.json", intermediate_size=64), "another shape"),
        (lambda folder: _edit(folder / "config.json", model_type="nobody"), "upgrade transformers"),
        (lambda folder: _edit(folder / "config.json", model_type="t5"), "is an encoder-decoder"),
        (lambda folder: _edit(folder / "config.json", model_type="vit"), "is not a causal language model"),
        (_bring_code, "brings its own code; read it, then pass --trust-remote-code"),
    ],
)
def test_a_broken_folder_is_one_sentence(folder: Path, damage: Callable[[Path], object], sentence: str) -> None:
    """What is wrong, where, and what to do; no traceback of somebody else's."""
    damage(folder)
    with pytest.raises(PairError, match=sentence) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    """The weights file itself is a common slip."""
    with pytest.raises(PairError, match="is a file; give the folder"):
        load_model(folder / "model.safetensors")


def test_pickled_weights_load_when_asked_for(folder: Path) -> None:
    """The user vouches for them."""
    expected = load_model(folder).model.logits([[1, 2]])
    _pickle(folder)
    torch.testing.assert_close(load_model(folder, allow_pickle=True).model.logits([[1, 2]]), expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "fp7"}, "dtype 'fp7' is unknown; use one of float64, float32, bfloat16, float16"),
        ({"device": "tpu9"}, "device 'tpu9' is unknown"),
        ({"device": "meta"}, "device 'meta' can't be used here"),
        ({"device": "cpu:7"}, "device 'cpu:7' can't be used here"),
        ({"device": "cuda:63"}, "device 'cuda:63' was asked for, but"),
    ],
)
def test_a_device_or_dtype_that_isnt_there_is_one_sentence(
    folder: Path, options: dict[str, str], sentence: str
) -> None:
    """Nothing is read before the options are known to make sense."""
    with pytest.raises(UsageError, match=sentence):
        load_model(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is absent")
def test_cuda_asked_for_and_absent() -> None:
    """The sentence says how to go on without one; `auto` goes on by itself."""
    with pytest.raises(UsageError, match="sees none; use --device cpu"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_a_hub_name_while_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No retry, no traceback: give a folder, or download it first."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PairError, match="nobody/nothing is not a folder here, and the hub can't be reached"):
        load_model("nobody/nothing")


def test_a_mistyped_folder_waits_for_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody answers, so the nearest folder is named at once; the hub's own client would try for half a minute."""

    def nobody(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise TimeoutError

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("specverify.models.hub.socket.create_connection", nobody)
    monkeypatch.setattr("specverify.models.hub.getproxies", dict)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.test")
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("the hub's client was asked"))
    (tmp_path / "models" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PairError, match=r"models/targt is not a folder here \(did you mean models/target\?\), and the hub"
    ):
        load_model("models/targt")
    with pytest.raises(PairError, match="nobody/nothing is not a folder here, and the hub can't be reached"):
        load_model("nobody/nothing")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://me:hunter2/x@hub.test")
    with pytest.raises(PairError, match="HF_ENDPOINT is no address of a hub; mend it"):
        load_model("nobody/nothing")
    assert asked == [("hub.test", 443)] * 2


def test_a_configuration_of_another_size_names_the_tensor(folder: Path) -> None:
    """Not what transformers says to somebody who calls it."""
    _edit(folder / "config.json", vocab_size=33)
    with pytest.raises(
        PairError, match=r"weights of another shape than config.json says \((lm_head|model.embed_tokens)"
    ):
        load_model(folder)


@pytest.mark.parametrize("text", ['{"model": 3}', "nonsense"])
def test_a_broken_tokenizer_is_named(folder: Path, text: str) -> None:
    """The weights are whole, so nobody should look at them."""
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(PairError, match=f"the tokenizer of {folder} can't be read .*copy or download its files again"):
        load_model(folder)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError("x/y is not a local folder and is not a valid model identifier listed on 'https://hf.co'"),
            "neither a folder",
        ),
        (OSError("You are trying to access a gated repo.\nMake sure to have access"), "gated on the hub"),
        (torch.OutOfMemoryError("CUDA out of memory."), "does not fit into memory; use --dtype bfloat16"),
        (MemoryError(), "does not fit into memory"),
        (ImportError("This modeling file requires the following packages: einops."), "needs a package"),
        (ValueError("loading x/y requires the option `trust_remote_code=True`"), "--trust-remote-code"),
        (RuntimeError("something new\nand its traceback"), r"can't be loaded \(RuntimeError: something new\)"),
    ],
)
def test_what_transformers_raises_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    """Each known cause has its own advice; an unknown one keeps its first line."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr("specverify.models.loading.require_hub", lambda name: None)
    with pytest.raises(PairError, match=sentence) as caught:
        load_model("x/y")
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_in_a_folder_is_refused(folder: Path) -> None:
    """It loads, and is refused because of what it is, not of how it lies there."""
    config = AutoConfig.for_model("mamba", vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM keeps a recurrent state"):
        load_model(folder)


def test_a_folders_own_code_runs_only_when_it_is_asked_for(folder: Path) -> None:
    """Refused with what to pass; with it, the class in the folder is what is loaded."""
    _edit(
        folder / "config.json",
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "own_code.MineConfig", "AutoModelForCausalLM": "own_code.MineForCausalLM"},
    )
    (folder / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n\n\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    with pytest.raises(PairError, match="--trust-remote-code"):
        load_model(folder)
    loaded = load_model(folder, trust_remote_code=True)
    assert type(loaded.model.module).__name__ == "MineForCausalLM"
    assert torch.isfinite(loaded.model.logits([[1, 2, 3]])).all()
