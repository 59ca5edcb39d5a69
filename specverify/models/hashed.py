"""A language model whose law is a hash of the prefix, so texts are long, varied and cheap: for whole checks at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["VOCAB_SIZE", "HashedModel", "HashedSession", "detokenize"]

VOCAB_SIZE = 24
_CPU = torch.device("cpu")


@lru_cache(maxsize=1_000_000)
def _normal(key: tuple[int, ...]) -> Float[Tensor, " vocab"]:
    """Normal numbers that depend on the key alone."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF))


@dataclass(frozen=True, eq=False)
class HashedModel:
    """Logits are normal numbers seeded by the whole prefix; those of a draft are the target's, disturbed."""

    name: str = "target"
    seed: int = 0
    near: HashedModel | None = None
    disturbed_by: float = 0.6
    rounding: float = 0.0
    """Size of a disturbance that depends on the shape of the batch, as in low precision."""
    vocab_size: int = VOCAB_SIZE
    num_embeddings: int = VOCAB_SIZE
    max_length: int = 128
    device: torch.device = _CPU

    def row(self, prefix: tuple[int, ...]) -> Float[Tensor, " vocab"]:
        """Logits after `prefix`."""
        noise = _normal((self.seed, *prefix))
        return 1.5 * noise if self.near is None else self.near.row(prefix) + self.disturbed_by * noise

    def rounded(self, prefix: tuple[int, ...], shape: int) -> Float[Tensor, " vocab"]:
        """Logits as a batch of that shape computes them."""
        return self.row(prefix) + self.rounding * _normal((shape, *prefix)) if self.rounding else self.row(prefix)

    def open(self, prompts: Sequence[Sequence[int]]) -> HashedSession:
        """One row a prompt."""
        return HashedSession(self, [tuple(prompt) for prompt in prompts])

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """Right-padded."""
        out = torch.zeros(len(sequences), max(map(len, sequences)), self.vocab_size)
        for row, ids in enumerate(sequences):
            for place in range(len(ids)):
                out[row, place] = self.rounded(tuple(ids[: place + 1]), -1)
        return out


@dataclass
class HashedSession:
    """Prefixes as tuples."""

    model: HashedModel
    prefixes: list[tuple[int, ...]]
    tree: list[list[tuple[int, ...]]] = field(default_factory=list)
    """Prefixes of the entries of the block appended last."""

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        return torch.tensor([len(prefix) for prefix in self.prefixes], dtype=torch.int64)

    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        """Logits after each appended token; entries of a tree are kept aside until one of its paths is."""
        out = torch.zeros(*token_ids.shape, self.model.vocab_size)
        above = torch.arange(-1, token_ids.shape[1] - 1).expand_as(token_ids) if parents is None else parents
        rows = zip(token_ids.tolist(), num_tokens.tolist(), above.tolist(), strict=True)
        self.tree = []
        for row, (ids, count, over) in enumerate(rows):
            entries: list[tuple[int, ...]] = []
            for place, token in enumerate(ids[:count]):
                entries.append((*(entries[over[place]] if over[place] >= 0 else self.prefixes[row]), token))
                out[row, place] = self.model.rounded(entries[-1], len(self.prefixes))
            self.tree.append(entries)
            if parents is None and entries:
                self.prefixes[row] = entries[-1]
        return out

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """The path that ends in the last place."""
        for row, (path, count) in enumerate(zip(places.tolist(), num_kept.tolist(), strict=True)):
            self.prefixes[row] = self.tree[row][path[count - 1]] if count else self.prefixes[row]

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Drop the last tokens."""
        self.prefixes = [prefix[:kept] for prefix, kept in zip(self.prefixes, lengths.tolist(), strict=True)]

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows."""
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]


def detokenize(ids: Sequence[int]) -> str:
    """Two letters a token."""
    return "".join(f"{chr(97 + token)}{'xyz'[token % 3]}" for token in ids)
