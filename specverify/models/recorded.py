"""Forward passes of one row, recorded once a shape and replayed: TorchScript on the CPU, a CUDA graph on CUDA.

Note [Recorded passes]: at batch 1 a pass of a small model is mostly Python, and on CUDA mostly launches. Over a KV cache of
fixed capacity no shape changes from step to step, so a pass is recorded as it runs and replayed from then on. A recording
is used only where it gives the bits of the pass that it records at another place, for other ids; otherwise the same pass
over the same buffers runs as Python. Other branches for other tokens (experts, RoPE that follows the length) would be lost
in a recording, so only architectures without any are recorded. Weights are held by reference: one that is replaced (not
edited in place) after a recording is not seen.

Slots past the row's end hold finite leftovers, hidden by the mask: their weights are exactly 0.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from specverify.models.kv_cache import MASKED_ATTENTION, cache_argument, counts_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

    from specverify.models.kv_cache import MaskedCache

    Pass = Callable[..., Tensor]
    """Logits from ids, the slot of the first of them, and the buffers, which it writes to."""

__all__ = ["RecordedPasses"]

_ARCHITECTURES = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"})
_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Whose frequencies don't follow the length."""
_LEAST_CAPACITY = 64


class _FixedLayer(DynamicLayer):
    """Keys and values in buffers of fixed size, written at given slots, shown whole."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Int[Tensor, " block"]) -> None:
        super().__init__()
        self.keys, self.values, self._slots = keys, values, slots
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the block, show everything."""
        del args, kwargs
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions and mask are given, so nobody needs to know."""
        return 0


class RecordedPasses:
    """The recordings of one model, and the buffers that they run over."""

    def __init__(self, module: PreTrainedModel, *, record: bool = True) -> None:
        """`record=False` runs every pass over the same buffers as Python."""
        self._module, self._record = module, record
        self._passes: dict[tuple[int, int], Pass] = {}
        """By tokens of the block and capacity."""
        self._rooms: dict[int, list[Tensor]] = {}
        """By capacity: the buffers that recordings on CUDA are bound to."""
        self._held: weakref.WeakKeyDictionary[MaskedCache, Tensor] = weakref.WeakKeyDictionary()
        """The first of the buffers that a live cache was moved into."""

    @staticmethod
    def possible(module: PreTrainedModel) -> bool:
        """Whether the passes of this model are all alike, and take a mask."""
        config = module.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in _ARCHITECTURES
            and rope.get("rope_type", "default") in _ROPES
            and config._attn_implementation in MASKED_ATTENTION  # noqa: SLF001 - no public name
            and not counts_slots(module)
            and module.device.type in {"cpu", "cuda"}
        )

    def __call__(self, token_ids: Int[Tensor, "1 block"], cache: MaskedCache) -> Float[Tensor, "1 block vocab"] | None:
        """The logits of a block, which the cache then holds but for its bookkeeping; None where it isn't one plain row."""
        buffers, start = cache.plain_row, cache.num_slots
        if buffers is None:
            return None
        needed = start + token_ids.shape[1]
        if buffers[0].shape[2] < needed or self._held.get(cache) is not buffers[0]:
            buffers = self._room(cache, buffers, needed)
            cache.adopt(buffers)
        logits = self._pass(token_ids, start, buffers)(
            token_ids, torch.tensor(start, device=token_ids.device), *buffers
        )
        cache.fill(needed)
        return logits

    def _pass(self, token_ids: Tensor, start: int, buffers: list[Tensor]) -> Pass:
        """The recording for this shape, made where there is none; on CUDA for the buffers of a room alone."""
        block, capacity = token_ids.shape[1], buffers[0].shape[2]
        if token_ids.is_cuda and self._rooms[capacity][0] is not buffers[0]:
            return self._eager
        if (block, capacity) not in self._passes:
            self._passes[block, capacity] = self._recorded(token_ids, start, buffers)
        return self._passes[block, capacity]

    def _room(self, cache: MaskedCache, like: list[Tensor], needed: int) -> list[Tensor]:
        """Buffers of the least capacity: those of the room, or fresh ones while another session is in it."""
        capacity = max(_LEAST_CAPACITY, 1 << (needed - 1).bit_length())
        fresh = [buffer.new_zeros(1, buffer.shape[1], capacity, buffer.shape[3]) for buffer in like]
        room = self._rooms.setdefault(capacity, fresh)
        if any(held is room[0] for other, held in self._held.items() if other is not cache):
            room = fresh
        for buffer in room:
            buffer.zero_()  # so that nothing that isn't finite stays behind
        self._held[cache] = room[0]
        return room

    def _eager(self, token_ids: Tensor, start: Tensor, *buffers: Tensor) -> Tensor:
        """The pass itself, with positions and mask from `start`."""
        slots = start + torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = torch.arange(buffers[0].shape[2], device=token_ids.device) > slots[:, None]
        dtype = self._module.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=token_ids.device)
        cache = DynamicCache()
        cache.layers = [_FixedLayer(*pair, slots) for pair in zip(buffers[::2], buffers[1::2], strict=True)]
        arguments: dict[str, Any] = {str(cache_argument(self._module)): cache}
        logits: Tensor = self._module(
            input_ids=token_ids,
            position_ids=slots[None],
            attention_mask=mask.masked_fill(hidden, torch.finfo(dtype).min)[None, None],
            use_cache=True,
            **arguments,
        ).logits
        return logits

    def _recorded(self, token_ids: Tensor, start: int, buffers: list[Tensor]) -> Pass:
        """A recording that was seen to give the same bits elsewhere, or else the pass itself."""
        if not self._record:
            return self._eager
        before = [buffer.clone() for buffer in buffers]
        here = torch.tensor(start, device=token_ids.device)
        other = (token_ids.flip(1) + 1) % self._module.get_input_embeddings().num_embeddings
        elsewhere = other, torch.tensor(max(start - 1, 0), device=token_ids.device)
        try:
            with _recording(self._module):
                replay = (_graph if token_ids.is_cuda else _trace)(self._eager, token_ids, here, buffers)
            _put_back(buffers, before)
            found = [replay(*elsewhere, *buffers).clone(), *(buffer.clone() for buffer in buffers)]
            _put_back(buffers, before)
            expected = [self._eager(*elsewhere, *buffers), *buffers]
            same = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        except RuntimeError:  # whatever this version of torch can't record
            same = False
        finally:
            _put_back(buffers, before)
        return replay if same else self._eager


def _put_back(buffers: list[Tensor], before: list[Tensor]) -> None:
    for buffer, held in zip(buffers, before, strict=True):
        buffer.copy_(held)


@contextlib.contextmanager
def _recording(module: PreTrainedModel) -> Iterator[None]:
    """Without gradients, which a constant can't have, and without what torch says about Python that is recorded away."""
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's own signature
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_()


def _trace(run: Pass, token_ids: Tensor, start: Tensor, buffers: list[Tensor]) -> Pass:
    return cast("Pass", torch.jit.trace(run, (token_ids, start, *buffers), check_trace=False))


def _graph(run: Pass, token_ids: Tensor, start: Tensor, buffers: list[Tensor]) -> Pass:
    """Bound to these buffers; the logits are copied out, for the next replay overwrites them."""
    ids, here, graph = token_ids.clone(), start.clone(), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(ids, here, *buffers)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        logits = run(ids, here, *buffers)

    def replay(token_ids: Tensor, start: Tensor, *_: Tensor) -> Tensor:
        ids.copy_(token_ids)
        here.copy_(start)
        graph.replay()
        return logits.clone()

    return replay
