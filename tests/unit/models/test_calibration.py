"""The calibration pair: it loads, its law depends on all that came before, and its draft is far from its target."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.errors import OutputError, UsageError
from specverify.models.calibration import CalibrationPair, write_calibration_pair
from specverify.models.loading import Pair, load_pair

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float
    from torch import Tensor

    from specverify.models import LanguageModel

WITHOUT_GGUF = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf isn't installed")
PREFIXES = torch.randint(0, 32, (200, 10), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> CalibrationPair:
    return write_calibration_pair(tmp_path_factory.mktemp("calibration") / "pair")


@pytest.fixture(scope="module")
def pair(written) -> Pair:
    return load_pair(written.target, written.draft, device="cpu", dtype="float64")


def law(model: LanguageModel, prefixes: list[list[int]]) -> Float[Tensor, "prefixes vocab"]:
    return model.logits(prefixes)[:, -1].softmax(-1)


def distance(one: Float[Tensor, "n vocab"], other: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    return (one - other).abs().sum(-1) / 2


def test_law_is_neither_flat_nor_one_hot_and_ends_now_and_then(pair, written):
    p = law(pair.target.model, PREFIXES)
    assert 0.1 < float(p.amax(-1).mean()) < 0.5
    assert 1.5 < float(torch.special.entr(p).sum(-1).mean()) < 3.2
    assert float(p.mean(0).min()) > 0.005  # every token is seen, EOS among them
    assert 0.01 < float(p[:, written.eos_token_id].mean()) < 0.2


@pytest.mark.parametrize("place", range(10))
def test_law_depends_on_each_token_of_the_prefix(pair, place):
    changed = [[*ids[:place], (ids[place] + 7) % 32, *ids[place + 1 :]] for ids in PREFIXES]
    assert float(distance(law(pair.target.model, PREFIXES), law(pair.target.model, changed)).mean()) > 0.1


def test_law_depends_on_where_a_token_stands(pair):
    swapped = [[ids[1], ids[0], *ids[2:]] for ids in PREFIXES]
    assert float(distance(law(pair.target.model, PREFIXES), law(pair.target.model, swapped)).mean()) > 0.1


def test_an_opposed_draft_is_far_and_a_near_one_is_near(pair, tmp_path):
    near = write_calibration_pair(tmp_path / "near", opposed=False)
    close = load_pair(near.target, near.draft, device="cpu", dtype="float64")
    p = law(pair.target.model, PREFIXES)
    assert torch.equal(p, law(close.target.model, PREFIXES))  # the same target
    assert 0.7 < float(distance(p, law(pair.draft.model, PREFIXES)).mean()) < 0.95
    assert 0.1 < float(distance(p, law(close.draft.model, PREFIXES)).mean()) < 0.3


@pytest.mark.parametrize("vocab_size", [16, 32, 64])
def test_every_id_but_eos_is_one_printable_character_of_the_text(tmp_path, vocab_size):
    written = write_calibration_pair(tmp_path / "pair", vocab_size=vocab_size)
    tokenizer = load_pair(written.target, device="cpu").target.tokenizer
    ids = list(range(vocab_size - 1))
    text = tokenizer.decode(ids)
    assert text.isprintable()
    assert len(text) == vocab_size - 1
    assert tokenizer.encode(text) == ids
    assert tokenizer.eos_token_id == written.eos_token_id == vocab_size - 1 == len(tokenizer) - 1
    assert tokenizer.encode(text + tokenizer.eos_token) == [*ids, vocab_size - 1]


def test_vocabulary_and_hidden_size_differ(pair):
    """Exporters have been seen to take any layer with vocabulary-many outputs for the head."""
    for vocab_size in (pair.target.model.vocab_size, pair.target.model.num_embeddings):
        assert vocab_size not in {pair.target.config.hidden_size, pair.target.config.intermediate_size}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_same_arguments_give_the_same_files_and_another_seed_another_model(tmp_path, written):
    state = torch.get_rng_state()
    write_calibration_pair(tmp_path / "again")
    assert torch.equal(state, torch.get_rng_state())  # the caller's generator stands where it stood
    assert files_of(tmp_path / "again") == files_of(written.target.parent)
    other = write_calibration_pair(tmp_path / "other", seed=1)
    weights = "model.safetensors"
    assert (other.target / weights).read_bytes() != (written.target / weights).read_bytes()


def test_a_folder_that_holds_the_pair_is_left_as_it_is(tmp_path):
    first = write_calibration_pair(tmp_path / "pair")
    stamp = (first.target / "config.json").stat().st_mtime_ns
    assert write_calibration_pair(tmp_path / "pair") == first
    assert (first.target / "config.json").stat().st_mtime_ns == stamp


def test_nothing_else_is_overwritten_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="choose an empty or new folder"):
        write_calibration_pair(tmp_path / "pair")
    assert files_of(tmp_path) == {"pair/mine.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_an_empty_folder_is_taken(tmp_path):
    assert write_calibration_pair(tmp_path).target.is_dir()


@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_a_vocabulary_beyond_the_alphabet_is_refused(tmp_path, vocab_size):
    with pytest.raises(UsageError, match=f"ids, not {vocab_size}"):
        write_calibration_pair(tmp_path / "pair", vocab_size=vocab_size)


def test_without_the_package_a_gguf_file_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"needs the package gguf; install specverify-decoding\[llamacpp\]"):
        write_calibration_pair(tmp_path / "pair", gguf=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.llamacpp
@WITHOUT_GGUF
def test_gguf_files_hold_the_same_weights(tmp_path):
    """As they lie there; that llama.cpp computes the same law from them, `tests/engines` shows."""
    from gguf import GGUFReader

    written = write_calibration_pair(tmp_path / "pair", gguf=True)
    loaded = load_pair(written.target, written.draft, device="cpu")
    for file, model in ((written.target_gguf, loaded.target), (written.draft_gguf, loaded.draft)):
        tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in GGUFReader(file).tensors}
        weights = model.model.module.state_dict()
        assert len(tensors) == len(weights)
        assert torch.equal(tensors["output.weight"], weights["lm_head.weight"])
        assert torch.equal(tensors["blk.1.ffn_up.weight"], weights["model.layers.1.mlp.up_proj.weight"])
        rotated = tensors["blk.0.attn_q.weight"], weights["model.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(rotated[0][:4], rotated[1][[0, 8, 1, 9]])  # neighbours, not halves of a head of 16
