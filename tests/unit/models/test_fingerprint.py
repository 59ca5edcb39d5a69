"""Fingerprints: each digest answers one question, and none depends on where the folder lies."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.models.fingerprint import fingerprint
from specverify.models.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.records import ModelFingerprint

_DIGESTS = ("weights_sha256", "tokenizer_sha256", "template_sha256", "config_sha256")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def _digests(found: ModelFingerprint) -> dict[str, str]:
    return {name: getattr(found, name) for name in _DIGESTS}


def _one_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _one_token(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["other"] = tokenizer["model"]["vocab"].pop("w9")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _edited(name: str, key: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {key: value}))

    return edit


@pytest.mark.parametrize(
    ("change", "digest"),
    [
        (_one_weight, "weights_sha256"),
        (_one_token, "tokenizer_sha256"),
        (_edited("tokenizer_config.json", "add_bos_token", value=True), "tokenizer_sha256"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ 1 }}"), "template_sha256"),
        (_edited("config.json", "rms_norm_eps", 1e-3), "config_sha256"),
        (_edited("generation_config.json", "temperature", 0.5), "config_sha256"),
        (_edited("config.json", "transformers_version", "5.99"), None),
        (_edited("config.json", "_name_or_path", "/elsewhere"), None),
    ],
)
def test_a_change_shows_in_its_own_digest_only(
    folder: Path, change: Callable[[Path], None], digest: str | None
) -> None:
    """Weights, tokenizer, template and configuration are told apart; paths and versions are no change."""
    before = _digests(fingerprint(load_model(folder)))
    change(folder)
    after = _digests(fingerprint(load_model(folder)))
    assert {name for name in _DIGESTS if before[name] != after[name]} == ({digest} - {None})


def test_a_copied_folder_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    """Only the name differs."""
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    first, second = fingerprint(load_model(folder)), fingerprint(load_model(copy))
    assert first.name != second.name
    assert replace(first, name="") == replace(second, name="")


def test_figures_and_files(folder: Path) -> None:
    """Every file that was used has its own digest; weights in another format don't count."""
    (folder / "pytorch_model.bin").write_bytes(b"not used")
    found = fingerprint(load_model(folder))
    assert found.architecture == "LlamaForCausalLM"
    assert found.vocab_size == 31
    assert found.num_parameters == load_model(folder).model.num_parameters
    assert set(found.files) == {file.name for file in folder.iterdir()} - {"pytorch_model.bin"}
    assert all(len(digest) == 64 for digest in (*found.files.values(), *_digests(found).values()))


def test_the_tokenizers_last_use_is_no_change(folder: Path) -> None:
    """Padding and truncation are state that any caller sets."""
    loaded = replace(load_model(folder), source="memory")
    before = fingerprint(loaded)
    loaded.tokenizer.pad_token = "w0"
    padded = fingerprint(loaded)
    loaded.tokenizer(["w1", "w2 w3"], padding=True, truncation=True, max_length=4)
    assert fingerprint(loaded) == padded
    assert padded.tokenizer_sha256 != before.tokenizer_sha256


def test_without_files_the_tensors_are_digested(folder: Path) -> None:
    """A model that was made in memory, or whose files are gone, has a fingerprint too."""
    loaded = replace(load_model(folder), source="memory")
    before = fingerprint(loaded)
    assert not before.files
    assert fingerprint(loaded) == before
    with torch.no_grad():
        loaded.model.module.model.norm.weight[0] += 1
    assert fingerprint(loaded).weights_sha256 != before.weights_sha256
