"""The stages of the recipe, from the three corpora to complete model folders."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from specverify.pairs.recipe import corpus
from specverify.pairs.recipe.prompts import write_prompts
from specverify.pairs.recipe.tokenizer import EOS, documents, train_tokenizer
from specverify.pairs.recipe.train import Shape, held_out_nats, new_model, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

__all__ = ["Documents", "Steps", "encode", "make", "read_documents"]

TARGET = Shape(layers=12, hidden=128, feed_forward=352, heads=4)
DRAFT = Shape(layers=1, hidden=96, feed_forward=256, heads=3)
POOR = Shape(layers=4, hidden=128, feed_forward=352, heads=4)
HELD_OUT = {
    "austen": ("persuasion",),
    "shakespeare": ("macbeth",),
    "code": ("json/decoder", "textwrap", "bisect", "queue", "fnmatch"),
}
SHARES = {"austen": 0.7, "shakespeare": 0.15, "code": 0.15}


@dataclass(frozen=True)
class Steps:
    """How many steps each stage takes; the defaults made what is shipped."""

    target: int = 1000
    draft: int = 500
    distil: int = 600
    poor: int = 60


@dataclass(frozen=True)
class Documents:
    """Runs of paragraphs by domain: what is trained on, and the works that are held out."""

    training: dict[str, list[str]]
    unseen: dict[str, list[str]]
    code_sha256: str


def read_documents(austen: Path, shakespeare: Path) -> Documents:
    """Read, split by work and cut. Exits with a sentence when a package is not the pinned one."""
    texts = {"austen": corpus.austen(austen), "shakespeare": corpus.shakespeare(shakespeare), "code": corpus.code()}
    split = {domain: corpus.split(works, HELD_OUT[domain]) for domain, works in texts.items()}
    return Documents(
        training={domain: documents(text, unwrap=domain == "austen") for domain, (text, _) in split.items()},
        unseen={domain: documents(text, unwrap=domain == "austen") for domain, (_, text) in split.items()},
        code_sha256=corpus.sha256_of(texts["code"]),
    )


def make(austen: Path, shakespeare: Path, out: Path, *, steps: Steps, target_folder: Path | None = None) -> None:
    """Train everything and write complete folders, the prompts, and `training.json` beside them."""
    texts = read_documents(austen, shakespeare)
    if texts.code_sha256 != corpus.CODE_SHA256:
        version = platform.python_version()
        note = f"this is Python {version}: its library differs from {corpus.CODE_PYTHON}'s, and so will the weights"
        print(note, flush=True)  # noqa: T201 - a command's own words
    tokenizer = train_tokenizer(document for part in texts.training.values() for document in part)
    streams = {domain: encode(tokenizer, part) for domain, part in texts.training.items()}
    evaluation = {domain: encode(tokenizer, part) for domain, part in texts.unseen.items()}
    mixed = [(SHARES[domain], stream) for domain, stream in streams.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(texts.unseen, out / "prompts.jsonl")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    record: dict[str, dict[str, float | str]] = {"corpus": {"code_sha256": texts.code_sha256}}

    def keep(name: str, model: LlamaForCausalLM, num_steps: int, seconds: float) -> None:
        nats = {f"nats_{domain}": held_out_nats(model, stream) for domain, stream in evaluation.items()}
        sizes = {"parameters": model.num_parameters(), "steps": num_steps}
        record[name] = {**sizes, "seconds": round(seconds, 1), **nats}
        save(model, tokenizer, out / name)
        (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    if target_folder:
        target = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    else:
        target = new_model(TARGET, seed=1, **ids)
        keep("target", target, steps.target, train(target, mixed, steps=steps.target, seed=2, log="target"))
    draft = new_model(DRAFT, seed=3, **ids)
    seconds = train(draft, mixed, steps=steps.draft, seed=4, log="draft")
    keep("draft-marginal", draft, steps.draft, seconds)
    seconds += train(draft, mixed, steps=steps.distil, seed=5, teacher=target, rate=0.01, log="distil")
    keep("draft", draft, steps.draft + steps.distil, seconds)
    poor = new_model(POOR, seed=6, **ids)
    foreign = [(1.0, streams["shakespeare"])]
    keep("draft-poor", poor, steps.poor, train(poor, foreign, steps=steps.poor, seed=7, log="poor"))


def encode(tokenizer: PreTrainedTokenizerFast, parts: list[str]) -> Tensor:
    """One stream of ids, an EOS after each document."""
    encoded = tokenizer([part + EOS for part in parts], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids])


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A complete folder, renamed into place when all of it is there.

    The weights are fp16, and the tied head is not stored twice. `dtype` in config.json says float32: half the bytes are
    shipped, but a plain `from_pretrained` computes in fp32, where greedy texts agree across batches.
    """
    weights = {name: value.half() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for left_over in (fresh, old):
        shutil.rmtree(left_over, ignore_errors=True)
    model.save_pretrained(fresh, state_dict=weights)
    tokenizer.save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
