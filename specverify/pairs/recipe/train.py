"""Training: Muon for matrices, AdamW for the rest, cosine to zero; the draft is then distilled from the target."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from specverify.pairs.recipe.muon import Muon
from specverify.pairs.recipe.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["Shape", "held_out_nats", "new_model", "train"]

_MAX_POSITIONS = 512


@dataclass(frozen=True)
class Shape:
    """Size of a Llama-architecture model."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int


def new_model(shape: Shape, *, seed: int, eos_token_id: int, pad_token_id: int) -> LlamaForCausalLM:
    """Freshly initialised, fp32, embeddings tied."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    streams: list[tuple[float, Int[Tensor, " tokens"]]],
    *,
    steps: int,
    seed: int,
    teacher: LlamaForCausalLM | None = None,
    rate: float = 0.02,
    batch: int = 8,
    length: int = 256,
    log: str = "",
) -> float:
    """Train on windows drawn from weighted `streams`; with a teacher the loss is KL to it. Returns seconds taken."""
    generator = torch.Generator().manual_seed(seed)
    optimisers = _optimisers(model, rate)
    weights = torch.tensor([weight for weight, _ in streams])
    started = time.perf_counter()
    model.train()
    for step in range(steps):
        # a tenth of the steps, late, on windows twice as long and half as many: prompts of 300 tokens are in range
        long = step > steps * 0.8 and step % 2 == 0
        windows = _windows(streams, weights, batch // 2 if long else batch, length * 2 if long else length, generator)
        logits = model(windows[:, :-1]).logits
        loss = _loss(logits, windows[:, 1:], teacher, windows[:, :-1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, base in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = base * _schedule(step, steps)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if log and step % 25 == 0:
            print(f"{log} step {step} loss {loss.item():.3f} {time.perf_counter() - started:.0f} s", flush=True)  # noqa: T201 - a command's own words
    model.eval()
    return time.perf_counter() - started


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * max(0.0, min(1.0, (steps - step) / (0.7 * steps)))


def _optimisers(model: LlamaForCausalLM, rate: float) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=rate)
    adam = torch.optim.AdamW(others, lr=rate / 4, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, rate), (adam, rate / 4)]


def _windows(
    streams: list[tuple[float, Tensor]], weights: Tensor, batch: int, length: int, generator: torch.Generator
) -> Int[Tensor, "batch length_plus_1"]:
    picks = torch.multinomial(weights, batch, replacement=True, generator=generator).tolist()
    rows = []
    for pick in picks:
        stream = streams[pick][1]
        start = int(torch.randint(len(stream) - length - 1, (1,), generator=generator))
        rows.append(stream[start : start + length + 1])
    return torch.stack(rows)


def _loss(
    logits: Float[Tensor, "batch length vocab"],
    wanted: Int[Tensor, "batch length"],
    teacher: LlamaForCausalLM | None,
    inputs: Tensor,
) -> Tensor:
    if teacher is None:
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())
    with torch.no_grad():
        soft = teacher(inputs).logits.softmax(-1)
    return cross_entropy(logits.flatten(0, 1), soft.flatten(0, 1)) - torch.special.entr(soft).sum(-1).mean()


@torch.inference_mode()
def held_out_nats(
    model: LlamaForCausalLM, stream: Int[Tensor, " tokens"], *, windows: int = 40, length: int = 256
) -> float:
    """Mean cross-entropy, nats a token, over evenly spread windows of a held-out stream."""
    starts = torch.linspace(0, len(stream) - length - 1, windows).long().tolist()
    rows = torch.stack([stream[start : start + length + 1] for start in starts])
    logits = torch.cat([model(part[:, :-1]).logits for part in rows.split(8)])
    return float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
