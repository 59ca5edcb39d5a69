"""A KV cache for a ragged batch, and with `slot_layer` and `recorded` all that touches the cache of transformers (5.17 to 5.24).

Note [Rollback in a ragged batch]: every row of a batch rejects a different number of tokens, so a row's tokens need not
lie in neighbouring slots. A rollback is an edit of `mask`: a slot that is not in it is never attended to again, and
position ids count the tokens that are. The layers stay as they are, except that trailing slots that no row uses are
dropped (with one row that is every rollback, so a single row never has holes).

This is right as long as attention asks only "is this slot visible" and "what is its position". It is wrong where the
distance between two *slots* counts: sliding windows, chunks, local attention, ALiBi, and models that take no position
ids. Their cache is brought to left padding before every append (`counts_slots`). Recurrent states can't be rolled back
at all; `require_rollback` refuses them before anything runs.

Note [The block is visible to itself]: a block is right-ragged, and its unused entries come after the used ones, so
causality hides them from every logit that is defined. They are therefore left visible while the block runs: each query
sees at least itself, no row of the attention matrix is empty, and no NaN can enter the cache. They leave `mask` as
soon as the block is in.

Note [Trees]: a block that is a tree gets the whole attention mask, entry by entry: what the row holds, the entry's
ancestors, itself. Its slots stay out of `mask` until `keep` has chosen a path; the others are then holes like those of a
rollback, and nothing was copied. A parent's slot lies before its children's, so slots stay in the order of tokens. Where
the distance of two slots counts, siblings would shift each other, so `require_tree_attention` refuses those models.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from specverify.errors import InternalError, UnsupportedModel
from specverify.models.slot_layer import SlotLayer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray
    from torch import Tensor
    from transformers import PreTrainedModel

    from specverify.models.tree_block import TreeBlock

__all__ = [
    "MASKED_ATTENTION",
    "MaskedCache",
    "cache_argument",
    "counts_slots",
    "require_rollback",
    "require_tree_attention",
    "too_many_holes",
]

_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""The name in `forward`, newest first; 5.24 warns about the old one."""

MASKED_ATTENTION = ("sdpa", "eager")
"""Implementations of attention that take any mask; the others know causality and padding alone."""

_ALIBI_MODELS = frozenset({"bloom", "mpt"})

_ALWAYS_CAUSAL = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Models whose configuration has the field `is_decoder`, False unless set, and which never read it (Pythia is one)."""

_ATTENTION_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Cache layers that hold keys and values and nothing else (a dummy layer holds nothing: it shares another's)."""


# ------------------------------------------------------------------------------------------------ what a model needs


def cache_argument(module: PreTrainedModel) -> str | None:
    """The name under which `forward` takes its cache, or None if it takes none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), None)


def require_rollback(module: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` unless all that the model remembers is keys and values that a mask can hide.

    Looks at the configuration and the class only; nothing is run.
    """
    reason = _why_not(module)
    if reason is not None:
        architecture = type(module).__name__
        msg = f"{architecture} {reason}; use a decoder-only attention model (Llama, Qwen3, GPT-2, ...)"
        raise UnsupportedModel(msg)


def _why_not(module: PreTrainedModel) -> str | None:
    config = module.config
    if config.is_encoder_decoder:
        return "is an encoder-decoder, which does not continue a prompt"
    is_decoder = config.model_type in _ALWAYS_CAUSAL or getattr(config, "is_decoder", True)
    if is_decoder is False or getattr(config, "is_causal", True) is False:
        return "attends in both directions, so it is not a causal language model"
    text_config = config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if module._is_stateful:  # noqa: SLF001 - the only place where transformers says so
        states = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
        layers = f" ({', '.join(states)} layers)" if states else ""
        return f"keeps a recurrent state{layers} that can't be rolled back when a draft is rejected"
    if cache_argument(module) is None:
        return "takes no KV cache that could be rolled back"
    if not takes_position_ids(module) and not _uses_alibi(text_config):
        return "takes no position ids, so rows of different lengths can't share a batch"
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules()):
        return "counts positions from its padding id, so a token's position depends on the tokens before it"
    try:
        classes = {type(layer).__name__ for layer in DynamicCache(config=text_config).layers}
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"has layers whose cache is unknown here ({', '.join(sorted(kinds)) or text_config.model_type})"
    others = sorted(classes.difference(_ATTENTION_LAYERS))
    return f"has a cache layer ({', '.join(others)}) that is not plain keys and values" if others else None


def counts_slots(module: PreTrainedModel) -> bool:
    """Whether the distance between two slots matters, so that the cache must be left-padded before every append.

    Left padding is what `generate` uses, so it is right for every model; holes are allowed only where it is known that
    they do no harm. Code that does not come with transformers hasn't been read, so it gets left padding.
    """
    config = module.config.get_text_config(decoder=True)
    full_attention = set(getattr(config, "layer_types", None) or ("full_attention",)) <= {"full_attention"}
    windows = ("sliding_window", "attention_chunk_size", "attention_types", "attn_config")
    return (
        not type(module).__module__.startswith("transformers.models.")
        or not takes_position_ids(module)
        or not full_attention
        or any(getattr(config, name, None) for name in windows)
        or _uses_alibi(config)
    )


def require_tree_attention(module: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` unless each entry of a block can be told what it sees; see Note [Trees]."""
    implementation = module.config.get_text_config(decoder=True)._attn_implementation  # noqa: SLF001 - no public name
    if counts_slots(module):
        reason = "attends by the distance of two slots (a window, ALiBi, or code that does not come with transformers)"
        remedy = "use a rule over a chain, such as --rule chain, or a target with full attention"
    elif implementation not in MASKED_ATTENTION:
        reason = f"was loaded with {implementation} attention, which takes no mask of its own"
        remedy = "use a rule over a chain, such as --rule chain, or load it with sdpa attention"
    else:
        return
    msg = f"{type(module).__name__} {reason}, so it can't verify a tree of drafts; {remedy}"
    raise UnsupportedModel(msg)


def _uses_alibi(config: Any) -> bool:  # noqa: ANN401 - every architecture has its own class
    """Whether a token's position shows only as its distance to the others [Press2022]; then left padding is right."""
    return config.model_type in _ALIBI_MODELS or bool(getattr(config, "alibi", False))


def takes_position_ids(module: PreTrainedModel) -> bool:
    """Whether `forward` can be told where each token stands."""
    return "position_ids" in inspect.signature(module.forward).parameters


def too_many_holes(num_slots: int, longest: int) -> bool:
    """Whether compaction pays: it saves `num_slots - longest` slots of attention a step, for one copy of the cache.

    A quarter of the longest row, and at least 32, bounds the waste to 25 % and makes copies rare on short rows.
    """
    return num_slots - longest > max(32, longest // 4)


# ------------------------------------------------------------------------------------------------ the cache


class MaskedCache:
    """Which slot of which row holds a token, beside the keys and values themselves.

    The bookkeeping is NumPy on the host: a step costs a few microseconds and no kernel launch.
    """

    def __init__(self, module: PreTrainedModel, batch: int) -> None:
        self.lengths: Int[ndarray, " batch"] = np.zeros(batch, dtype=np.int64)
        self.mask: Bool[ndarray, "batch slots"] = np.zeros((batch, 0), dtype=bool)
        self._architecture = type(module).__name__
        self._device = module.device
        self._argument = cache_argument(module)
        self._left_padded = counts_slots(module)
        self._dtype = module.dtype
        self._tree: TreeBlock | None = None
        self._takes_position_ids = takes_position_ids(module)
        self._cache = DynamicCache()
        self._cache.layer_class_to_replicate = SlotLayer
        self._layers = cast("list[SlotLayer]", self._cache.layers)

    @property
    def num_slots(self) -> int:
        """Slots a row, holes included."""
        return int(self.mask.shape[1])

    @property
    def plain_row(self) -> list[Float[Tensor, "1 heads capacity features"]] | None:
        """The buffers of keys and values, layer by layer, if this is one row without holes that holds something."""
        if len(self.lengths) != 1 or self._tree is not None or not 0 < self.num_slots == self.lengths[0]:
            return None
        return [buffer for layer in self._layers for buffer in layer.buffers]

    def adopt(self, buffers: list[Float[Tensor, "1 heads capacity features"]]) -> None:
        """Move everything into these buffers, in the order of `plain_row`."""
        for layer, keys, values in zip(self._layers, buffers[::2], buffers[1::2], strict=True):
            layer.adopt(keys, values)

    def fill(self, slots: int) -> None:
        """The buffers were written up to here by other hands."""
        for layer in self._layers:
            layer.fill(slots)

    def arguments(
        self, num_tokens: Int[ndarray, " batch"], block: int, tree: TreeBlock | None = None
    ) -> dict[str, Any]:
        """What `forward` needs beside the ids; compacts first where that is due. `block` is the most of `num_tokens`.

        Without holes the model's own defaults (no mask, positions from the cache) mean the same and cost less.
        """
        self._require_closed()
        if self._compaction_due():
            self.compact()
        arguments: dict[str, Any] = {str(self._argument): self._cache, "use_cache": True}
        if tree is not None:
            arguments["attention_mask"] = self._tree_mask(tree)
            arguments["position_ids"] = self._positions(np.maximum(tree.depths, 0), tree.height)
            return arguments
        if int(self.lengths.sum()) == self.mask.size:
            return arguments
        visible = np.ones((len(self.mask), self.num_slots + block), dtype=bool)  # Note [The block is visible to itself]
        visible[:, : self.num_slots] = self.mask
        arguments["attention_mask"] = torch.from_numpy(visible).to(self._device).long()
        if self._takes_position_ids:
            arguments["position_ids"] = self._positions(np.arange(block), num_tokens)
        return arguments

    def _tree_mask(self, tree: TreeBlock) -> Float[Tensor, "batch 1 block slots_and_block"]:
        """Added to the scores: 0 where an entry sees a slot, the least number elsewhere; see Note [Trees]."""
        held = np.repeat(self.mask[:, None], tree.sees.shape[1], axis=1)
        hidden = torch.from_numpy(~np.concatenate((held, tree.sees), axis=2)).to(self._device)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill(hidden, torch.finfo(self._dtype).min)[:, None]

    def _positions(
        self, offsets: Int[ndarray, "*batch block"], num_tokens: Int[ndarray, " batch"]
    ) -> Int[Tensor, "batch block"]:
        """Of a block's entries; unused ones stay within the positions that there are."""
        last = np.maximum(self.lengths + num_tokens - 1, 0)[:, None]
        return torch.from_numpy(np.minimum(self.lengths[:, None] + offsets, last)).to(self._device)

    def append(self, num_tokens: Int[ndarray, " batch"], block: int, tree: TreeBlock | None = None) -> None:
        """Record that `forward` has put a block into the layers; nothing of a tree is visible before `keep`."""
        layers = self._layers
        if block and (not layers or layers[-1].slots != self.num_slots + block):
            msg = (
                f"{self._architecture} does not use the KV cache that it is given; use a model of another architecture"
            )
            raise UnsupportedModel(msg)
        added = np.zeros_like(num_tokens) if tree is not None else num_tokens
        self.mask = np.concatenate((self.mask, np.arange(block) < added[:, None]), axis=1)
        self.lengths, self._tree = self.lengths + added, tree

    def keep(self, places: Int[ndarray, "batch depth"], num_kept: Int[ndarray, " batch"]) -> None:
        """Make one path of the open tree visible, and close it."""
        if self._tree is None:
            msg = "no tree is open, so none of its paths can be kept"
            raise InternalError(msg)
        kept = self._tree.path(places, num_kept)
        self.mask[:, self.num_slots - kept.shape[1] :] = kept
        self.lengths, self._tree = self.lengths + num_kept, None
        self._drop_unused_tail()

    def _require_closed(self) -> None:
        if self._tree is not None:
            msg = "a tree is open; keep one of its paths first"
            raise InternalError(msg)

    def rollback(self, lengths: Int[ndarray, " batch"]) -> None:
        """Keep the first `lengths[b]` tokens of each row; see Note [Rollback in a ragged batch]."""
        self._require_closed()
        if lengths.shape != self.lengths.shape or (lengths < 0).any() or (lengths > self.lengths).any():
            msg = f"rollback to {lengths.tolist()} tokens, but the rows hold {self.lengths.tolist()}"
            raise InternalError(msg)
        if (lengths == self.lengths).all():
            return
        self.lengths = lengths.copy()
        if len(lengths) == 1 and self.mask.all():
            self._truncate(int(lengths[0]))
            return
        self.mask = self.mask & (self.mask.cumsum(axis=1, dtype=np.int32) <= lengths[:, None])
        self._drop_unused_tail()

    def select(self, rows: Int[ndarray, " rows"]) -> None:
        """Keep these rows, in this order; duplicates are allowed."""
        self._require_closed()
        if len(rows) == len(self.lengths) and (rows == np.arange(len(rows))).all():
            return
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]
        index = torch.from_numpy(rows).to(self._device)
        for layer in self._layers:
            layer.select_rows(index)
        self._drop_unused_tail()

    def compact(self) -> None:
        """Bring every row to the right edge in the order of its tokens: left padding, no holes."""
        width = int(self.lengths.max(initial=0))
        order = self.mask.argsort(axis=1, kind="stable")[:, self.num_slots - width :]  # holes first, then the tokens
        self.mask = np.take_along_axis(self.mask, order, axis=1)
        slots = torch.from_numpy(np.ascontiguousarray(order)).to(self._device)
        for layer in self._layers:
            layer.gather_slots(slots)

    def _compaction_due(self) -> bool:
        if too_many_holes(self.num_slots, int(self.lengths.max(initial=0))):
            return True
        if not self._left_padded or not self.num_slots:
            return False
        return bool((self.mask[:, :-1] & ~self.mask[:, 1:]).any())  # a token with a hole to its right

    def _drop_unused_tail(self) -> None:
        used = np.flatnonzero(self.mask.any(axis=0))
        self._truncate(int(used[-1]) + 1 if len(used) else 0)

    def _truncate(self, slots: int) -> None:
        if slots < self.num_slots:
            self.mask = self.mask[:, :slots]
            for layer in self._layers:
                layer.truncate(slots)
