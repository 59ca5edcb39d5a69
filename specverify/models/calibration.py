"""The calibration pair: two tiny checkpoints that every engine loads, whose exact law costs nothing to compute.

Note [Calibration pair]: a fault in a sampler, a random stream, a cache or a stop shows whatever the model, so the model is
chosen to show it. The vocabulary is narrow, so 10^5 samples say something of every token; attention outweighs the last
token, so a cache that is off by one moves every law; the draft has the target's body and its head turned round, so it
prefers what the target avoids and every leak of it is large; EOS is one of the ordinary ids, and not id 0. All ids
are printable characters, JSON's among them, so that servers detokenise, stop at strings and obey a schema.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specverify.errors import OutputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jaxtyping import Float
    from torch import Tensor

__all__ = ["ALPHABET", "EOS", "CalibrationPair", "write_calibration_pair"]

ALPHABET = '{}[]:,"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-+_!?'
"""The text of each id but the last."""
EOS = "<eos>"
"""The text of the last id."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}:{% endfor %}"
_SMALLEST_VOCABULARY = 8
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _MAX_LENGTH = 64, 2, 4, 2, 512
_EMBEDDING_STD = 0.6
"""Small beside attention's part of the residual stream, which is what carries the rest of the prefix."""
_SPREAD = 1.5
"""Standard deviation of the logits: the likeliest of 32 tokens has about 0.27, and the entropy is 2.6 nats of 3.5."""
_DISTURBED = 0.35
"""Of a near draft's head, in its own standard deviations."""
_MERGED = ("a", "b")
"""Two characters that are one token of a draft with a tokenizer of its own."""
_CONTENTS = "calibration.json"
"""Says what the folder was made from."""


@dataclass(frozen=True, kw_only=True)
class CalibrationPair:
    """Where the two checkpoints lie."""

    target: Path
    """In the Hugging Face layout, as `draft`."""
    draft: Path
    target_gguf: Path | None
    draft_gguf: Path | None
    eos_token_id: int
    vocab_size: int


def write_calibration_pair(
    folder: Path,
    *,
    vocab_size: int = 32,
    opposed: bool = True,
    seed: int = 0,
    gguf: bool = False,
    own_tokenizer: bool = False,
    half: bool = False,
    one_head: bool = False,
) -> CalibrationPair:
    """Write target and draft under `folder`, all of it or nothing; the same arguments give the same weights.

    `opposed` turns the draft's head round; otherwise the draft is near the target. `own_tokenizer` gives the draft one
    with the ids from the last to the first, and a token more, of two characters. `half` rounds the weights to what float16
    holds, and the GGUF has its matrices so: OpenVINO reads no other, and the law of both is still the same. `one_head` gives attention one
    head of 64 numbers in place of four of 16, which vLLM's kernels don't take (0.32 on a CPU: from 32 on). A folder that holds this very pair is left
    as it is. Raises `OutputError` where it holds anything else or can't be written, `UsageError` for a vocabulary that
    the alphabet doesn't reach, or where `gguf` is asked for and the package isn't installed.

        pair = write_calibration_pair(Path("calibration"))
    """
    if not _SMALLEST_VOCABULARY <= vocab_size <= len(ALPHABET) + 1:
        msg = (
            f"a calibration pair has {_SMALLEST_VOCABULARY} to {len(ALPHABET) + 1} ids, not {vocab_size}; "
            "narrow vocabularies show most"
        )
        raise UsageError(msg)
    contents = {
        "vocab_size": vocab_size,
        "opposed": opposed,
        "seed": seed,
        "gguf": gguf,
        "own_tokenizer": own_tokenizer,
        "half": half,
        "one_head": one_head,
    }
    pair = _pair(folder, vocab_size, gguf=gguf)
    if _holds(folder, contents):
        return pair
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    try:
        aside.mkdir(parents=True)
        _write(
            _pair(aside, vocab_size, gguf=gguf),
            opposed=opposed,
            seed=seed,
            own_tokenizer=own_tokenizer,
            half=half,
            one_head=one_head,
        )
        (aside / _CONTENTS).write_text(json.dumps(contents), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # only an empty one goes
        aside.replace(folder)
    except OSError as error:
        if _holds(folder, contents):  # another run was faster
            return pair
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        msg = f"can't write the calibration pair to {folder}: {reason}; choose an empty or new folder"
        raise OutputError(msg) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return pair


def _pair(folder: Path, vocab_size: int, *, gguf: bool) -> CalibrationPair:
    return CalibrationPair(
        target=folder / "target",
        draft=folder / "draft",
        target_gguf=folder / "target.gguf" if gguf else None,
        draft_gguf=folder / "draft.gguf" if gguf else None,
        eos_token_id=vocab_size - 1,
        vocab_size=vocab_size,
    )


def _holds(folder: Path, contents: dict[str, int | bool]) -> bool:
    try:
        return bool(json.loads((folder / _CONTENTS).read_text(encoding="utf-8")) == contents)
    except (OSError, ValueError):
        return False


def _write(pair: CalibrationPair, *, opposed: bool, seed: int, own_tokenizer: bool, half: bool, one_head: bool) -> None:
    target = _random_model(pair.vocab_size, seed, one_head=one_head)
    draft, tokens = _drafting(target, seed, opposed=opposed), _tokens(pair.vocab_size)
    if half:
        for model in (target, draft):
            model.half().float()
    _write_folder(target, _tokenizer(tokens), pair.target)
    if own_tokenizer:
        draft = _with_other_ids(draft, seed)
        _write_folder(draft, _tokenizer([*tokens[::-1], "".join(_MERGED)], merges=[_MERGED]), pair.draft)
    else:
        _write_folder(draft, _tokenizer(tokens), pair.draft)
    for model, file in ((target, pair.target_gguf), (draft, pair.draft_gguf)):
        if file is not None:
            _write_gguf(model, file, half=half)


def _write_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """What `save_pretrained` writes, without its progress bar, and with a class of tokenizer that older releases know."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    table = json.loads(settings.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(table, indent=2), encoding="utf-8")


def _tokens(vocab_size: int) -> list[str]:
    return [*ALPHABET[: vocab_size - 1], EOS]


def _tokenizer(tokens: Sequence[str], *, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE, mostly without merges: each character is its own token, and text that has no token is left out."""
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, model_max_length=_MAX_LENGTH, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@torch.no_grad()
def _random_model(vocab_size: int, seed: int, *, one_head: bool) -> LlamaForCausalLM:
    """A Llama whose every layer keeps its input's size, so that no part of the prefix fades away."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=1 if one_head else _HEADS,
        num_key_value_heads=1 if one_head else _KV_HEADS,
        max_position_embeddings=_MAX_LENGTH,
        bos_token_id=None,
        eos_token_id=vocab_size - 1,
        tie_word_embeddings=False,
    )
    model = _blank(config)
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms
            continue
        std = _EMBEDDING_STD if "embed_tokens" in name else _gain(name) / weight.shape[1] ** 0.5
        weight.copy_(std * torch.randn(weight.shape, generator=random))
    return model


def _blank(config: LlamaConfig) -> LlamaForCausalLM:
    """A model whose weights are about to be replaced; drawing them must not move the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        return LlamaForCausalLM(config)


def _gain(name: str) -> float:
    """Of a layer's output over its input. Queries and keys are large, so that attention chooses."""
    gains = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.5, "o_proj": 1.5, "lm_head": _SPREAD}
    return next((gain for part, gain in gains.items() if part in name), 1.0)


@torch.no_grad()
def _drafting(target: LlamaForCausalLM, seed: int, *, opposed: bool) -> LlamaForCausalLM:
    """The target's body with another head: turned round, or disturbed."""
    draft = _blank(target.config)
    draft.load_state_dict(target.state_dict())
    head: Float[Tensor, "vocab hidden"] = draft.lm_head.weight
    if opposed:
        head.neg_()
    else:
        random = torch.Generator().manual_seed(seed + 1)
        head.add_(_DISTURBED * _SPREAD / _HIDDEN**0.5 * torch.randn(head.shape, generator=random))
    return draft


@torch.no_grad()
def _with_other_ids(model: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """The same law of characters under ids from the last to the first, and beside them the token of two."""
    config = copy.deepcopy(model.config)
    config.vocab_size, config.eos_token_id = model.config.vocab_size + 1, 0
    other = _blank(config)
    random = torch.Generator().manual_seed(seed + 2)
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        row = state[name].std() * torch.randn((1, _HIDDEN), generator=random)
        state[name] = torch.cat((state[name].flip(0), row))
    other.load_state_dict(state)
    return other


# ------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def _write_gguf(model: LlamaForCausalLM, file: Path, *, half: bool) -> None:
    """The same weights in llama.cpp's own format, in float32, or the matrices in float16."""
    try:
        import gguf  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        msg = "a GGUF file needs the package gguf; install specverify-decoding[llamacpp]"
        raise UsageError(msg) from error
    config = model.config
    tokens = _tokens(config.vocab_size)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # the loader wants one; what it makes is no token
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)  # noqa: FBT003 - the package's own signature
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        rotated = next((count for part, count in heads.items() if part in name), 0)
        tensor = _interleaved(weight, rotated) if rotated else weight
        matrix = half and tensor.dim() > 1
        writer.add_tensor(_gguf_name(name), (tensor.half() if matrix else tensor.float()).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for part, its in _GGUF_NAMES.items():
        name = name.replace(part, its)
    return name


def _interleaved(weight: Float[Tensor, "rows hidden"], heads: int) -> Float[Tensor, "rows hidden"]:
    """Rows in llama.cpp's order: it rotates neighbours, where transformers rotates halves of a head."""
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)
