"""Keys and values of one layer, slot by slot; which slot holds a token is `kv_cache`'s to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["SlotLayer"]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow, so that an append copies only what is new.

    Every layer is of this kind, sliding ones too: nothing that left the window is thrown away before a rollback, and
    the model's own mask applies the window.
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the base class takes any
        super().__init__(**kwargs)
        self.keys: Tensor
        self.values: Tensor
        self.slots = 0
        self.buffers: list[Float[Tensor, "batch heads capacity features"]] = []

    def update(
        self,
        key_states: Float[Tensor, "batch heads block features"],
        value_states: Float[Tensor, "batch heads block value_features"],
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write the block into the next free slots; all keys and values, as views."""
        del args, kwargs
        start, block = self.slots, key_states.shape[-2]
        self.slots = start + block
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [key_states[..., :0, :], value_states[..., :0, :]]
        if self.buffers[0].shape[-2] < self.slots:
            self.buffers = [_grown(buffer, start, self.slots) for buffer in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(-2, start, block).copy_(states)
        self.keys, self.values = self._shown()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.slots

    def truncate(self, slots: int) -> None:
        """Drop the slots from `slots` on; no memory moves."""
        self.slots = min(slots, self.slots)

    def fill(self, slots: int) -> None:
        """Slots up to here are in use: what writes to `buffers` itself says so."""
        self.slots = slots

    def select_rows(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order, and the room to grow: the next append would make it again."""
        if self.buffers:
            self.buffers = [buffer.index_select(0, rows.to(buffer.device)) for buffer in self.buffers]
            self.keys, self.values = self._shown()

    def gather_slots(self, slots: Int[Tensor, "batch width"]) -> None:
        """Slot t of row b becomes slot `slots[b, t]` of today."""
        if self.buffers:
            index = slots.to(self.buffers[0].device)[:, None, :, None]
            self.buffers = [
                states.gather(-2, index.expand(-1, states.shape[1], -1, states.shape[-1])) for states in self._shown()
            ]
            self.slots = slots.shape[1]
            self.keys, self.values = self._shown()

    def adopt(self, *buffers: Float[Tensor, "batch heads capacity features"]) -> None:
        """Move into these buffers, which are no smaller."""
        for buffer, held in zip(buffers, self._shown(), strict=True):
            buffer.narrow(-2, 0, self.slots).copy_(held)
        self.buffers = list(buffers)
        self.keys, self.values = self._shown()

    def _shown(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer.narrow(-2, 0, self.slots) for buffer in self.buffers)
        return keys, values


def _grown(
    buffer: Float[Tensor, "batch heads capacity features"], used: int, needed: int
) -> Float[Tensor, "batch heads larger features"]:
    """A copy with a quarter of spare slots: the cost of growing stays a constant a token, the waste below 25 %."""
    capacity = needed + max(needed // 4, 32)
    larger = buffer.new_empty(*buffer.shape[:-2], capacity, buffer.shape[-1])
    larger.narrow(-2, 0, used).copy_(buffer.narrow(-2, 0, used))
    return larger
