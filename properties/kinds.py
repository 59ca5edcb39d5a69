"""Tiny random models, one for each kind of KV cache in transformers, and those that can't be rolled back.

Weights are drawn large (a logit has a standard deviation near 1), so that a token that should not be seen moves every
logit; float64, so that rounding does not hide it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specverify.models.transformers import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ACCEPTED", "REFUSED", "VOCAB_SIZE", "WINDOW", "AcceptedKind", "RefusedKind", "tiny_model"]

VOCAB_SIZE = 7
WINDOW = 3
"""Of sliding and local layers, and the size of a chunk: less than the texts."""

_LENGTH = 64
_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": _LENGTH,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT: dict[str, object] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": _LENGTH,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
_LATENT: dict[str, object] = _COMMON | {
    "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class AcceptedKind:
    """A kind of cache, the architecture that stands for it, and what its layers are called in transformers."""

    kind: str
    model_type: str
    sizes: dict[str, object]
    layer_types: frozenset[str] = frozenset({"full_attention"})
    allowed: float = 1e-10
    """Greatest difference of two logits; rounding is 1e-14 in float64, 1e-6 where a part (RoPE, softmax) stays in float32."""

    def __str__(self) -> str:
        return self.model_type


@dataclass(frozen=True)
class RefusedKind:
    """An architecture whose state is not plain keys and values, and the reason that must be given."""

    model_type: str
    reason: str
    sizes: dict[str, object] = field(default_factory=dict)
    encoder_decoder: bool = False

    def __str__(self) -> str:
        return self.model_type


_SLIDING, _FULL = frozenset({"sliding_attention"}), frozenset({"full_attention"})

ACCEPTED: dict[str, AcceptedKind] = {
    kind.model_type: kind
    for kind in (
        AcceptedKind("full attention, rotary", "llama", _COMMON),
        AcceptedKind("learned positions", "gpt2", _GPT),
        AcceptedKind("normalised queries and keys", "qwen3", _COMMON | {"head_dim": 8}),
        AcceptedKind("sliding window in every layer", "mistral", _COMMON | {"sliding_window": WINDOW}, _SLIDING),
        AcceptedKind(
            "sliding and full layers in turn", "gemma3_text",
            _COMMON | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING}, _SLIDING | _FULL,
        ),
        AcceptedKind(
            "attention sinks", "gpt_oss",
            _COMMON | {
                "head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "num_local_experts": 2,
                "num_experts_per_tok": 1,
            }, _SLIDING | _FULL,
        ),
        AcceptedKind(
            "chunked attention", "llama4_text",
            _COMMON | {
                "head_dim": 8, "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0], "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 24,
            }, _FULL | {"chunked_attention"}, allowed=1e-5,
        ),
        AcceptedKind(
            "layers that share keys and values", "gemma4_text",
            _COMMON | {
                "head_dim": 8, "global_head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 4,
                "layer_types": _ALTERNATING * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB_SIZE,
            }, _SLIDING | _FULL | {"dummy"},
        ),
        AcceptedKind("ALiBi", "bloom", _GPT | {"hidden_size": 16}, allowed=1e-5),
        AcceptedKind("latent attention", "deepseek_v3", _LATENT),
        AcceptedKind(
            "local attention", "gpt_neo",
            {
                "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": WINDOW,
                "bos_token_id": 1, "eos_token_id": 2, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": _LENGTH,
            }, allowed=1e-5,
        ),
        AcceptedKind("one head for all queries", "gpt_bigcode", _GPT),
        AcceptedKind("no `is_decoder` in the configuration", "gpt_neox", _COMMON),
    )
}  # fmt: skip
"""By model type, one for each kind of cache that can be rolled back."""

_FEW: dict[str, object] = {"num_hidden_layers": 2}

REFUSED: tuple[RefusedKind, ...] = (
    RefusedKind("mamba", "recurrent state", _FEW),
    RefusedKind("rwkv", "recurrent state", _FEW),
    RefusedKind("jamba", "recurrent state"),
    RefusedKind("recurrent_gemma", "recurrent state"),
    RefusedKind("qwen3_next", r"recurrent state \(linear_attention layers\)", {"num_hidden_layers": 4}),
    RefusedKind("falcon_h1", r"recurrent state \(hybrid layers\)", _FEW),
    RefusedKind("lfm2", "LinearAttentionLayer", _FEW | {"layer_types": ["conv", "full_attention"]}),
    RefusedKind("deepseek_v32", "DynamicIndexedLayer", _LATENT),
    RefusedKind("xlnet", "no KV cache", {"n_layer": 2}),
    RefusedKind("bert", "both directions", _FEW),
    RefusedKind("roberta", "counts positions from its padding id", _FEW | {"is_decoder": True}),
    RefusedKind("bart", "no position ids", {"decoder_layers": 2, "encoder_layers": 2}),
    RefusedKind("t5", "encoder-decoder", {"num_layers": 2}, encoder_decoder=True),
)


@cache
def tiny_model(model_type: str) -> TransformersModel:
    """The random model that stands for an accepted kind, in float64."""
    config = AutoConfig.for_model(model_type, **ACCEPTED[model_type].sizes)
    config._experts_implementation = "eager"  # noqa: SLF001 - the fused kernel has no float64
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
    return TransformersModel(module, model_type)


def shell(refused: RefusedKind) -> PreTrainedModel:
    """A refused model without weights: it must be refused for what it says about itself."""
    auto = AutoModelForSeq2SeqLM if refused.encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(refused.model_type, **refused.sizes))
