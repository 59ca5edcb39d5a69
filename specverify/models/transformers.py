"""Any causal language model of transformers behind the `LanguageModel` protocol.

A prompt is appended like any other block: rows of different length are right-ragged, so `open` is one forward pass
without a mask, and what it does to the cache is what every later block does. See `kv_cache` for what follows.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from specverify.errors import NonFiniteLogits, PairError, PromptError, UnsupportedModel
from specverify.models.kv_cache import MaskedCache, require_rollback, require_tree_attention
from specverify.models.recorded import RecordedPasses
from specverify.models.tree_block import TreeBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float, Int
    from numpy import ndarray
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = [
    "UNBOUNDED_LENGTH",
    "TransformersModel",
    "TransformersSession",
    "require_working_rollback",
    "require_working_trees",
    "stated_length",
]

UNBOUNDED_LENGTH = 2**31 - 1
"""`max_length` of a model whose configuration states none (ALiBi and the like)."""

_PROBE_ALLOWED = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Root mean square of cached minus recomputed logits, in standard deviations of the logits.

Measured on CPU (tiny, wide, mixture-of-experts and the embedded models): rounding is at most 2e-6 in fp32 and 7e-4 in
half precision; a rollback that leaves its tokens visible is 0.15 to 1.2. Rounding on CUDA has not been measured.
"""


def stated_length(text_config: Any) -> int:  # noqa: ANN401 - every architecture has its own class
    """Positions that a configuration states, under one name or another; `UNBOUNDED_LENGTH` where it states none."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
    stated = (getattr(text_config, name, None) for name in names)
    return next((value for value in stated if isinstance(value, int) and value > 0), UNBOUNDED_LENGTH)


@dataclass(frozen=True, eq=False)
class TransformersModel:
    """A causal language model of transformers. Raises `UnsupportedModel` if its state can't be rolled back."""

    module: PreTrainedModel
    name: str
    passes: Callable[[Tensor, MaskedCache], Tensor | None] | None = None
    """Replays the passes of a batch of one; see `recorded`."""

    def __post_init__(self) -> None:
        """Refuse what can't be driven, before anything runs."""
        require_rollback(self.module)
        self.module.train(mode=False)

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        head = self.module.get_output_embeddings()
        weight = getattr(head, "weight", None)
        return int(weight.shape[0] if weight is not None else self._text_config.vocab_size)

    @cached_property
    def num_embeddings(self) -> int:
        """Rows of the input layer: ids from here on can't be read."""
        return int(cast("torch.nn.Embedding", self.module.get_input_embeddings()).weight.shape[0])

    @cached_property
    def max_length(self) -> int:
        """Positions that the configuration states."""
        return stated_length(self._text_config)

    @cached_property
    def device(self) -> torch.device:
        """Where ids go in and logits come out."""
        return torch.device(self.module.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of weights and logits."""
        return self.module.dtype

    @property
    def num_processes(self) -> int:
        """That each hold a part of it; see `led`."""
        return 1

    @cached_property
    def num_parameters(self) -> int:
        """Tied weights count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def memory_bytes(self) -> int:
        """Parameters and buffers."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def recorded(self, *, record: bool = True) -> TransformersModel:
        """The same model, faster at batch 1; itself where its passes can't be recorded. See Note [Recorded passes]."""
        possible = RecordedPasses.possible(self.module)
        return replace(self, passes=RecordedPasses(self.module, record=record)) if possible else self

    @torch.inference_mode()
    def open(self, prompts: Sequence[Sequence[int]]) -> TransformersSession:
        """A session that holds the prompts, prefilled in one pass; `PromptError` for what can't be read."""
        session = TransformersSession(self, len(prompts))
        ids, lengths = self._padded(prompts)
        session.prefill(ids, lengths)
        return session

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """One pass without a cache; causality hides the padding on the right, so no mask is needed."""
        ids, lengths = self._padded(sequences)
        if not ids.shape[1]:
            return torch.zeros(*ids.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        logits = self.forward(torch.from_numpy(ids).to(self.device), use_cache=False)
        self.require_finite(logits, np.zeros_like(lengths), lengths)
        return logits

    def forward(
        self,
        token_ids: Int[Tensor, "batch block"],
        **arguments: Any,  # noqa: ANN401 - what `MaskedCache.arguments` gives
    ) -> Float[Tensor, "batch block vocab"]:
        """Logits of the module itself."""
        try:
            logits: Tensor = self.module(input_ids=token_ids, **arguments).logits
        except torch.OutOfMemoryError as error:
            rows, block = token_ids.shape
            msg = (
                f"{self.name} ran out of memory on {self.device} with {rows} rows of {block} tokens; "
                "use a smaller batch, shorter prompts, or --dtype bfloat16"
            )
            raise PairError(msg) from error
        return logits

    def require_ids(self, token_ids: Int[ndarray, "batch block"], lengths: Int[ndarray, " batch"]) -> None:
        """Raise `PromptError` unless the ids have embeddings and the rows (of these lengths) have positions."""
        if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.num_embeddings:
            row, place = np.argwhere((token_ids < 0) | (token_ids >= self.num_embeddings))[0]
            msg = (
                f"{self.name} has embeddings for ids 0 to {self.num_embeddings - 1}, but row {row} contains id "
                f"{token_ids[row, place]}; was the text encoded with another tokenizer?"
            )
            raise PromptError(msg)
        if lengths.size and int(lengths.max()) > self.max_length:
            msg = (
                f"{self.name} has positions for {self.max_length} tokens, but row {lengths.argmax()} would hold "
                f"{lengths.max()}; shorten the prompt or the number of new tokens"
            )
            raise PromptError(msg)

    def require_finite(
        self,
        logits: Float[Tensor, "batch block vocab"],
        starts: Int[ndarray, " batch"],
        num_tokens: Int[ndarray, " batch"],
    ) -> None:
        """Raise `NonFiniteLogits` for the first NaN or +inf; one reduction where there is none (max keeps NaN)."""
        if logits.numel() == 0 or float(logits.max()) < math.inf:
            return
        broken = ~(logits.amax(-1) < math.inf).cpu().numpy() & (np.arange(logits.shape[1]) < num_tokens[:, None])
        if broken.any():
            row, place = np.argwhere(broken)[0]
            kind = "NaN" if bool(logits[row, place].isnan().any()) else "+inf"
            msg = f"{self.name} returned {kind} after token {starts[row] + place} (counted from 0) of row {row}; check the weights"
            msg += "" if self.dtype in (torch.float32, torch.float64) else ", or try --dtype float32"
            raise NonFiniteLogits(msg)

    @cached_property
    def prefill_arguments(self) -> dict[str, Any]:
        """Prompts need no logits, and for a large vocabulary they would be the largest tensor of all."""
        accepted = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        return {"logits_to_keep": 1} if accepted else {}

    @property
    def _text_config(self) -> Any:  # noqa: ANN401 - every architecture has its own class
        return self.module.config.get_text_config(decoder=True)

    def _padded(
        self, sequences: Sequence[Sequence[int]]
    ) -> tuple[Int[ndarray, "batch length"], Int[ndarray, " batch"]]:
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        ids = np.zeros((len(sequences), int(lengths.max(initial=0))), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        self.require_ids(ids, lengths)
        return ids, lengths


class TransformersSession:
    """A batch of sequences and their KV cache; after any history its logits are those of a fresh pass."""

    def __init__(self, model: TransformersModel, batch: int) -> None:
        self._model = model
        self._cache = MaskedCache(model.module, batch)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        return torch.from_numpy(self._cache.lengths.copy()).to(self._model.device)

    @torch.inference_mode()
    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        """Append the first `num_tokens[b]` ids of each row; whatever stands after them is never read."""
        model = self._model
        counts: Int[ndarray, " batch"] = num_tokens.cpu().numpy()
        block = int(counts.max(initial=0))
        unused = token_ids.shape[1] - block
        tree = None if parents is None else TreeBlock(parents[:, :block], counts)
        if tree is not None:
            require_tree_attention(model.module)
        if not block:
            self._cache.append(counts, block, tree)
            return torch.zeros(*token_ids.shape, model.vocab_size, dtype=model.dtype, device=model.device)
        ids: Int[ndarray, "batch block"] = token_ids[:, :block].cpu().numpy()
        if int(counts.min()) < block:
            ids = np.where(np.arange(block) < counts[:, None], ids, 0)
            token_ids = torch.from_numpy(ids).to(model.device)
        starts = self._cache.lengths
        model.require_ids(ids, starts + (counts if tree is None else tree.height))
        logits = None
        if model.passes is not None and tree is None:
            logits = model.passes(token_ids[:, :block], self._cache)
        if logits is None:
            logits = model.forward(token_ids[:, :block], **self._cache.arguments(counts, block, tree))
        self._cache.append(counts, block, tree)
        model.require_finite(logits, starts, counts)
        return torch.nn.functional.pad(logits, (0, 0, 0, unused)) if unused else logits

    @torch.inference_mode()
    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """Keep one path of the open tree; the cache stays where it is."""
        self._cache.keep(places.cpu().numpy(), num_kept.cpu().numpy())

    def prefill(self, token_ids: Int[ndarray, "batch block"], num_tokens: Int[ndarray, " batch"]) -> None:
        """Append checked prompts whose logits nobody needs."""
        block = token_ids.shape[1]
        if block:
            model = self._model
            arguments = self._cache.arguments(num_tokens, block) | model.prefill_arguments
            model.forward(torch.from_numpy(token_ids).to(model.device), **arguments)
            self._cache.append(num_tokens, block)

    @torch.inference_mode()
    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Keep the first `lengths[b]` tokens of each row."""
        self._cache.rollback(lengths.cpu().numpy())

    @torch.inference_mode()
    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order; duplicates are allowed."""
        self._cache.select(rows.cpu().numpy())


@torch.inference_mode()
def require_working_rollback(model: TransformersModel) -> None:
    """Raise `UnsupportedModel` if a ragged rollback changes the logits: four passes over a handful of tokens.

    `require_rollback` reads what an architecture says about itself; this is what it does, tried or not.
    Logits that are not finite are left to the run that judges them.
    """
    ids = [token % model.num_embeddings for token in range(3, 15)]
    if model.max_length < len(ids):
        return
    session = model.open([ids[:4], ids[4:5]])
    sequences = [[*ids[:4], ids[5], *ids[8:10]], [ids[4], *ids[10:12]]]
    try:
        session.append(torch.tensor([ids[5:8], ids[6:9]], device=model.device), torch.tensor([3, 2]))
        session.rollback(torch.tensor([5, 1]))
        cached = session.append(torch.tensor([ids[8:10], ids[10:12]], device=model.device), torch.tensor([2, 2]))
        _require_recomputed(model, cached, sequences, "after a rollback")
    except NonFiniteLogits:
        return


@torch.inference_mode()
def require_working_trees(model: TransformersModel) -> None:
    """Raise `UnsupportedModel` if a tree's logits, or those after one of its paths, are not those of the path alone.

    `require_tree_attention` reads what an architecture says about itself; this is what it does.
    """
    require_tree_attention(model.module)
    ids = [token % model.num_embeddings for token in range(3, 15)]
    if model.max_length < len(ids):
        return
    session = model.open([ids[:4], ids[4:5]])
    sequences = [[*ids[:4], ids[5], ids[7], ids[8], ids[10]], [ids[4], ids[6], ids[9], ids[11]]]
    block = torch.tensor([ids[5:9], ids[6:10]], device=model.device)
    try:
        tree = session.append(block, torch.tensor([4, 4]), torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 0]]))
        session.keep(torch.tensor([[0, 2, 3], [0, 3, -1]]), torch.tensor([3, 2]))
        after = session.append(torch.tensor([[ids[10]], [ids[11]]], device=model.device), torch.tensor([1, 1]))
        _require_recomputed(model, torch.cat((tree[:, 3:], after), 1), sequences, "in a tree of drafts")
    except NonFiniteLogits:
        return


def _require_recomputed(
    model: TransformersModel, cached: Float[Tensor, "batch 2 vocab"], sequences: Sequence[Sequence[int]], where: str
) -> None:
    """Raise `UnsupportedModel` unless the logits are those of the last two tokens of each sequence."""
    full = model.logits(sequences).double()
    expected = torch.stack([row[len(ids) - 2 : len(ids)] for row, ids in zip(full, sequences, strict=True)])
    error = float((cached.double() - expected).square().mean().sqrt())
    if error > _PROBE_ALLOWED.get(model.dtype, 0.05) * float(expected.std()) + 1e-5:
        msg = (
            f"{model.name} gives other logits {where} than without a cache (they differ by {error:.2g} in "
            f"root mean square), so {type(model.module).__name__} can't be driven here; use another architecture"
        )
        raise UnsupportedModel(msg)
