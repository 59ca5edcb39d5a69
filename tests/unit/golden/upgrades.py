"""Upgrades made by hand: each changes the files of a pair as real ones do, and names the layer that must be blamed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specverify.golden.records import Layer
from specverify.pairs import embedded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["UPGRADES", "Upgrade", "copy_of", "tiny_pair"]


@dataclass(frozen=True)
class Upgrade:
    """One change of a folder with `target` and `draft`."""

    name: str
    apply: Callable[[Path], None]
    layer: Layer
    part: str
    """Which part of the layer must be named."""


def tiny_pair(folder: Path) -> Path:
    """Random weights of 2,048 ids under the embedded pair's own tokenizer, template and generation configuration.

    The draft is the target without its last layer, so that drafts are accepted now and then.
    """
    paths = embedded()
    for role, layers in (("target", 2), ("draft", 1)):
        shutil.copytree(
            getattr(paths, role), folder / role, ignore=shutil.ignore_patterns("model.safetensors", "config.json")
        )
        _save_random(folder / role, layers=layers)
    return folder


def _save_random(folder: Path, *, layers: int) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(30)  # laws with a shape, not the uniform one of a fresh model
        module.lm_head.weight.mul_(25)
        for block in module.model.layers:
            for projection in (block.self_attn.v_proj, block.self_attn.o_proj, block.mlp.down_proj):
                projection.weight.mul_(6)
    del module.model.layers[layers:]
    module.config.num_hidden_layers = layers
    kept = (folder / "generation_config.json").read_text(encoding="utf-8")
    module.half().save_pretrained(folder)
    (folder / "generation_config.json").write_text(kept, encoding="utf-8")
    _edit(folder / "config.json", lambda table: table.update(dtype="float32"))


def copy_of(pair: Path, folder: Path) -> Path:
    """A pair to change."""
    shutil.copytree(pair, folder)
    return folder


def _edit(file: Path, change: Callable[[Any], object]) -> None:
    table = json.loads(file.read_text(encoding="utf-8"))
    change(table)
    file.write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")


def _both(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(pair: Path) -> None:
        for role in ("target", "draft"):
            _edit(pair / role / name, change)

    return apply


def _weights(change: Callable[[dict[str, torch.Tensor]], object], role: str = "target") -> Callable[[Path], None]:
    def apply(pair: Path) -> None:
        file = pair / role / "model.safetensors"
        tensors = {name: value.clone() for name, value in load_file(file).items()}
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})

    return apply


def _retrain(pair: Path) -> None:
    lines = embedded().prompts.read_text(encoding="utf-8").split("\n")
    for role in ("target", "draft"):
        tokenizer = AutoTokenizer.from_pretrained(pair / role)
        tokenizer.train_new_from_iterator([lines], vocab_size=1500).save_pretrained(pair / role)


def _lose_added_token(pair: Path) -> None:
    _both("tokenizer.json", lambda table: table["added_tokens"].pop())(pair)
    _both("tokenizer_config.json", lambda table: table["extra_special_tokens"].pop())(pair)


def _change_template(pair: Path) -> None:
    for role in ("target", "draft"):
        file = pair / role / "chat_template.jinja"
        file.write_text("You are helpful.\n" + file.read_text(encoding="utf-8"), encoding="utf-8")


def _fine_tune(tensors: dict[str, torch.Tensor]) -> None:
    names = [name for name in sorted(tensors) if "mlp" in name][:3]
    for number, name in enumerate(names):
        noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(number))
        tensors[name] += (noise * tensors[name].float().std() * 1.5).to(tensors[name].dtype)


def _quantise(tensors: dict[str, torch.Tensor]) -> None:
    """Rows to 8 bits and back, as weight-only quantisation does."""
    for name, value in tensors.items():
        if value.ndim == 2:
            scale = value.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
            tensors[name] = ((value.float() / scale).round() * scale).to(value.dtype)


def _permute_rows(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.embed_tokens.weight"
    order = torch.arange(len(tensors[name]))
    order[40:80] = order[40:80].roll(1)
    tensors[name] = tensors[name][order]


def _swap_draft(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, value in tensors.items():
        noise = torch.randn(value.shape, generator=generator) * value.float().std().nan_to_num(1.0)
        tensors[name] = noise.to(value.dtype)


UPGRADES: tuple[Upgrade, ...] = (
    Upgrade("retrained tokenizer", _retrain, Layer.TOKENIZER, "vocabulary"),
    Upgrade(
        "one merge removed", _both("tokenizer.json", lambda t: t["model"]["merges"].pop(3)), Layer.TOKENIZER, "merges"
    ),
    Upgrade(
        "changed normaliser",
        _both("tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"})),
        Layer.TOKENIZER,
        "normaliser",
    ),
    Upgrade("lost added token", _lose_added_token, Layer.TOKENIZER, "added tokens"),
    Upgrade("changed chat template", _change_template, Layer.TOKENIZER, "chat template"),
    Upgrade(
        "another EOS token",
        _both("tokenizer_config.json", lambda t: t.update(eos_token="<|user|>")),
        Layer.TOKENIZER,
        "special tokens",
    ),
    Upgrade(
        "another EOS id",
        _both("generation_config.json", lambda t: t.update(eos_token_id=[0, 17])),
        Layer.SAMPLING,
        "eos_token_id",
    ),
    Upgrade("fine-tuned target", _weights(_fine_tune), Layer.WEIGHTS, "model.layers.0.mlp.down_proj.weight"),
    Upgrade("int8 target", _weights(_quantise), Layer.WEIGHTS, "model.layers.0.self_attn.q_proj.weight"),
    Upgrade("permuted rows", _weights(_permute_rows), Layer.WEIGHTS, "rows of model.embed_tokens.weight"),
    Upgrade("swapped draft", _weights(_swap_draft, "draft"), Layer.DRAFT, "model.embed_tokens.weight"),
    Upgrade(
        "changed default top_k", _both("generation_config.json", lambda t: t.update(top_k=5)), Layer.SAMPLING, "top_k"
    ),
)
