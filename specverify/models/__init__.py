"""Language models as the decoder sees them: append tokens, get logits, roll back.

`table` has a known law that depends on the whole prefix; `transformers` drives real models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["LanguageModel", "Session"]


class Session(Protocol):
    """A batch of sequences with the state (KV cache) that makes the next token cheap.

    What was rolled back never shows again: after any history of calls, the logits are those of a fresh pass over the
    tokens that are kept.
    """

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        ...

    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        """Append the first `num_tokens[b]` of each row's ids (0 is allowed); logits after each of them.

        `parents` makes the block a tree: each id follows the entry of the block that is named for it (-1: what the row
        held before), sees that entry and its ancestors only, and stands one position after it. A tree stays open until
        `keep` has chosen one of its paths: `lengths` doesn't count it, and nothing else may be asked. Logits past
        `num_tokens[b]` are undefined. Raises `NonFiniteLogits` where a defined row has NaN or +inf, `UnsupportedModel`
        for a tree where attention can't be masked freely.
        """
        ...

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """Close the tree: of its entries keep `places[b, : num_kept[b]]` alone, a path from a root, as the newest tokens.

        Raises `InternalError` where no tree is open, or where these places are no such path.
        """
        ...

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Keep the first `lengths[b]` tokens of each row; never more than it holds."""
        ...

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order; duplicates are allowed (samples that share a prompt)."""
        ...


class LanguageModel(Protocol):
    """A next-token law over `vocab_size` ids."""

    @property
    def name(self) -> str:
        """As the user knows it; used in messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer (may be padded beyond the tokenizer)."""
        ...

    @property
    def num_embeddings(self) -> int:
        """Rows of the input layer: ids from here on can be said, but not read."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence that it has positions for."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        ...

    def open(self, prompts: Sequence[Sequence[int]]) -> Session:
        """A session with one row a prompt, prefilled with all its tokens (an empty prompt gives an empty row)."""
        ...

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """Logits after every token of each sequence, in one pass without a cache; right-padded, undefined past the end."""
        ...
