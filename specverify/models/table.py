"""A language model whose law is a table over the whole prefix: known exactly, and different after every history.

Note [Whole-prefix tables]: a residual taken from the wrong row has TV 2e-16 on a law that ignores its context and 0.44 on
one that does not. So every law that a rule is tested on depends on the whole prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.errors import InternalError, PromptError
from specverify.tree import require_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["TableModel", "random_table"]


@dataclass(frozen=True)
class TableModel:
    """One row of log-probabilities a prefix: `levels[n]` holds the V^n rows of the prefixes of n tokens."""

    levels: tuple[Float[Tensor, "prefixes vocab"], ...]
    name: str = "table"

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.levels[0].shape[-1]

    @property
    def num_embeddings(self) -> int:
        """All of them can be read."""
        return self.vocab_size

    @property
    def max_length(self) -> int:
        """The longest prefix that has a row."""
        return len(self.levels) - 1

    @property
    def device(self) -> torch.device:
        """Where the table lives."""
        return self.levels[0].device

    def open(self, prompts: Sequence[Sequence[int]]) -> TableSession:
        """A session that holds the prompts."""
        session = TableSession(self, len(prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        session.append(padded, lengths)
        return session

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """Rows after every token of each sequence."""
        session = TableSession(self, len(sequences))
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        return session.append(padded, lengths)

    def row(self, prefix: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Log-probabilities after `prefix`."""
        index = 0
        for token in prefix:
            index = index * self.vocab_size + token
        return self.levels[len(prefix)][index]


@dataclass(frozen=True)
class _OpenTree:
    parents: Int[Tensor, "batch block"]
    num_tokens: Int[Tensor, " batch"]
    index: Int[Tensor, "batch block_plus_1"]
    """Of the prefix of entry i in column i + 1, of what the row holds in column 0."""
    lengths: Int[Tensor, "batch block_plus_1"]
    """Of the same prefixes."""


class TableSession:
    """Prefixes as numbers in base V; a rollback is a division."""

    def __init__(self, model: TableModel, batch: int) -> None:
        self._model = model
        self._index = torch.zeros(batch, dtype=torch.int64)
        self._lengths = torch.zeros(batch, dtype=torch.int64)
        self._tree: _OpenTree | None = None

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
        """Rows after each appended token."""
        self._require_closed()
        if parents is not None:
            return self._append_tree(token_ids, num_tokens, parents)
        logits = torch.zeros(*token_ids.shape, self._model.vocab_size, dtype=torch.float64)
        for place, ids in enumerate(token_ids.unbind(1)):
            appended = num_tokens > place
            self._index = torch.where(appended, self._index * self._model.vocab_size + ids, self._index)
            self._lengths = self._lengths + appended
            self._look_up(logits[:, place], self._index, self._lengths, appended)
        return logits

    def _append_tree(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"],
    ) -> Float[Tensor, "batch block vocab"]:
        """Rows after each entry."""
        logits = torch.zeros(*token_ids.shape, self._model.vocab_size, dtype=torch.float64)
        index, lengths = self._index[:, None], self._lengths[:, None]
        for place, ids in enumerate(token_ids.unbind(1)):
            appended = num_tokens > place
            after = torch.where(appended, parents[:, place] + 1, 0)[:, None]
            longer = torch.where(appended, index.gather(1, after)[:, 0] * self._model.vocab_size + ids, 0)
            depth = lengths.gather(1, after)[:, 0] + 1
            self._look_up(logits[:, place], longer, depth, appended)
            index, lengths = torch.cat((index, longer[:, None]), 1), torch.cat((lengths, depth[:, None]), 1)
        self._tree = _OpenTree(parents, num_tokens, index, lengths)
        return logits

    def _look_up(
        self,
        logits: Float[Tensor, "batch vocab"],
        index: Int[Tensor, " batch"],
        lengths: Int[Tensor, " batch"],
        appended: Bool[Tensor, " batch"],
    ) -> None:
        for length in lengths[appended].unique().tolist():
            if length > self._model.max_length:
                msg = (
                    f"{self._model.name} has no row for {length} tokens; its longest prefix is {self._model.max_length}"
                )
                raise PromptError(msg)
            rows = appended & (lengths == length)
            logits[rows] = self._model.levels[length][index[rows]]

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """The prefix of the last place that is kept."""
        if self._tree is None:
            msg = "no tree is open, so none of its paths can be kept"
            raise InternalError(msg)
        require_path(self._tree.parents, self._tree.num_tokens, places, num_kept)
        columns = torch.nn.functional.pad(places + 1, (1, 0)).gather(1, num_kept[:, None])
        self._index = self._tree.index.gather(1, columns)[:, 0]
        self._lengths, self._tree = self._tree.lengths.gather(1, columns)[:, 0], None

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Drop the last tokens of each row."""
        self._require_closed()
        self._index = self._index // self._model.vocab_size ** (self._lengths - lengths)
        self._lengths = lengths.clone()

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows."""
        self._require_closed()
        self._index, self._lengths = self._index[rows], self._lengths[rows]

    def _require_closed(self) -> None:
        if self._tree is not None:
            msg = "a tree is open; keep one of its paths first"
            raise InternalError(msg)


def random_table(
    vocab_size: int, max_length: int, *, seed: int, sharpness: float = 1.5, zeros: float = 0.0, name: str = "table"
) -> TableModel:
    """A table of random laws; each entry but the largest of a row is set to probability 0 with probability `zeros`."""
    generator = torch.Generator().manual_seed(seed)
    levels = []
    for length in range(max_length + 1):
        logits = sharpness * torch.randn(vocab_size**length, vocab_size, generator=generator, dtype=torch.float64)
        dropped = torch.rand(logits.shape, generator=generator) < zeros
        dropped &= logits < logits.amax(-1, keepdim=True)
        levels.append(logits.masked_fill(dropped, -torch.inf).log_softmax(-1))
    return TableModel(tuple(levels), name)
