"""Tiny random checkpoints. Weights are drawn large, so that a token that should not be seen moves every logit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

VOCAB_SIZE = 31
WINDOW = 5

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_SIZES = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}

BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2_SIZES, bos_token_id=1, eos_token_id=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=8, sliding_window=WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_SIZES,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


def random_module(architecture: str) -> PreTrainedModel:
    """A checkpoint whose logits have a standard deviation near 1."""
    torch.manual_seed(7)
    module = BUILDERS[architecture]()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return module
