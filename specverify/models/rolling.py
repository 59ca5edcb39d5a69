"""A language model whose law is one row of a table, chosen by a rolling hash of the whole prefix: long texts, cheaply.

Unlike `table` it has no longest prefix that matters, and unlike `hashed` a batch of thousands costs one look-up: it is
what engines are tried on where 10^5 tokens must take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.errors import InternalError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["RollingModel", "RollingSession", "rolling_pair"]

_NUM_ROWS = 4093
"""A prime, so that the token at every place of the prefix moves the row."""
_MULTIPLIER = 1021


@dataclass(frozen=True, eq=False)
class RollingModel:
    """The logits after a prefix are `table[hash(prefix)]`."""

    table: Float[Tensor, "rows vocab"]
    name: str = "rolling"
    max_length: int = 256

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.table.shape[1]

    @property
    def num_embeddings(self) -> int:
        """All of them can be read."""
        return self.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the table lives."""
        return self.table.device

    def open(self, prompts: Sequence[Sequence[int]]) -> RollingSession:
        """One row a prompt."""
        session = RollingSession(self, len(prompts))
        session.append(*_padded(prompts))
        return session

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """Right-padded."""
        return RollingSession(self, len(sequences)).append(*_padded(sequences))


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "batch length"], Int[Tensor, " batch"]]:
    lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences], dtype=torch.int64), lengths


class RollingSession:
    """The hash after each token of each row."""

    def __init__(self, model: RollingModel, batch: int) -> None:
        self._model = model
        self._hashes = torch.ones(batch, 1, dtype=torch.int64)
        self._lengths = torch.zeros(batch, dtype=torch.int64)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        return self._lengths

    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        """Logits after each appended token. Raises `PromptError` past the last position."""
        if parents is not None:
            msg = f"{self._model.name} reads no trees"
            raise InternalError(msg)
        longest = int((self._lengths + num_tokens).max()) if len(num_tokens) else 0
        if longest > self._model.max_length:
            msg = f"{self._model.name} has {self._model.max_length} positions, and {longest} were asked of it"
            raise PromptError(msg)
        block = token_ids.shape[1]
        self._hashes = torch.nn.functional.pad(self._hashes, (0, max(0, longest + block + 1 - self._hashes.shape[1])))
        here, hashes = self._hashes.gather(1, self._lengths[:, None]), []
        for place in range(block):
            here = (here * _MULTIPLIER + token_ids[:, place : place + 1] + 1) % len(self._model.table)
            hashes.append(here)
        if not hashes:
            return torch.zeros(*token_ids.shape, self._model.vocab_size, dtype=self._model.table.dtype)
        new = torch.cat(hashes, 1)
        places = self._lengths[:, None] + 1 + torch.arange(block)
        self._hashes = self._hashes.scatter(1, places, new)  # past `num_tokens` they are written over
        self._lengths = self._lengths + num_tokens
        return self._model.table[new]

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """No tree is ever open."""
        del places, num_kept
        msg = f"{self._model.name} reads no trees"
        raise InternalError(msg)

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Keep the first tokens of each row."""
        self._lengths = lengths.clone()

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows."""
        self._hashes, self._lengths = self._hashes[rows], self._lengths[rows]


def rolling_pair(
    *,
    vocab_size: int = 24,
    seed: int = 0,
    sharpness: float = 1.5,
    disturbed_by: float = 1.2,
    opposed: bool = False,
    max_length: int = 256,
) -> tuple[RollingModel, RollingModel]:
    """Target and draft: random laws in float64, those of the draft disturbed, or turned round where it is `opposed`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_NUM_ROWS, vocab_size)
    logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = disturbed_by * torch.randn(shape, generator=generator, dtype=torch.float64)
    drafted = -logits if opposed else logits + noise
    return RollingModel(logits, "rolling target", max_length), RollingModel(drafted, "rolling draft", max_length)
