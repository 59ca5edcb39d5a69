"""A draft model of another vocabulary, as a model over the target's ids: every drafter, rule and check takes it as it is.

Note [Two vocabularies]: an id that both tokenizers have is handed over as the other's [Timor2025]. Logits of ids that the
target lacks are dropped, and those of ids that the draft lacks are -inf, so what is drawn is q' = q / Z over the shared ids,
under the request's own sampling parameters, and q' is what a rule is told. What the draft *reads* changes acceptance only,
so an id of the target that it lacks is read as one id of its own: the last of the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.verification.vocabularies import require_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.models import LanguageModel, Session

__all__ = ["TranslatedModel"]


@dataclass(frozen=True, eq=False)
class TranslatedModel:
    """`model` with its ids handed over as the target's. Raises `PairError` where no id is shared, or two are one."""

    model: LanguageModel
    target_ids: Int[Tensor, " draft_vocab"]
    """The target's id of each of the model's, -1 where it has none."""
    read_as: Int[Tensor, " vocab"]
    """The model's id as which each of the target's is read."""

    def __post_init__(self) -> None:
        """Refuse what is no map."""
        require_map(self.target_ids)

    @property
    def name(self) -> str:
        """The model's own."""
        return self.model.name

    @property
    def vocab_size(self) -> int:
        """The target's ids."""
        return len(self.read_as)

    @property
    def num_embeddings(self) -> int:
        """Each of the target's ids can be read."""
        return len(self.read_as)

    @property
    def max_length(self) -> int:
        """One id for each of the target's, so as many positions."""
        return self.model.max_length

    @property
    def device(self) -> torch.device:
        """The model's own."""
        return self.model.device

    def open(self, prompts: Sequence[Sequence[int]]) -> Session:
        """A session of the model's, told and asked in the target's ids."""
        return _TranslatedSession(self, self.model.open(self._read(prompts)))

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """The model's own, over the target's ids."""
        return self.said(self.model.logits(self._read(sequences)))

    def said(self, logits: Float[Tensor, "*rows draft_vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Logits over the target's ids, -inf for those that the draft can't say."""
        shared = (self.target_ids >= 0).nonzero()[:, 0]
        over_all = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return over_all.index_copy(-1, self.target_ids[shared], logits.index_select(-1, shared))

    def _read(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        ids = self.read_as.tolist()
        return [[ids[token] for token in sequence] for sequence in sequences]


class _TranslatedSession:
    """One id for one id, so lengths and rollbacks are the model's own."""

    def __init__(self, translated: TranslatedModel, inner: Session) -> None:
        self._translated = translated
        self._inner = inner

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        return self._inner.lengths

    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        read = self._translated.read_as[token_ids.clamp(0, self._translated.vocab_size - 1)]
        return self._translated.said(self._inner.append(read, num_tokens, parents))

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        self._inner.keep(places, num_kept)

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        self._inner.rollback(lengths)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self._inner.select(rows)
