"""Two loaded models with a tokenizer each: which ids they share, and how each reads the other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.models.translated import TranslatedModel
from specverify.verification.vocabularies import shared_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from specverify.models.loading import LoadedModel

__all__ = ["Text", "text_of", "translated"]

_SPACES = str.maketrans("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\N{LOWER ONE EIGHTH BLOCK}")
"""Byte-level tokenizers write a leading space as the one sign, SentencePiece as the other."""


@dataclass(frozen=True)
class Text:
    """A tokenizer's two functions: no special ids are added, and none skipped."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [int(number) for number in self.tokenizer.encode(text, add_special_tokens=False, verbose=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def text_of(loaded: LoadedModel) -> Text:
    """The model's tokenizer."""
    return Text(loaded.tokenizer)


def translated(target: LoadedModel, draft: LoadedModel) -> TranslatedModel:
    """The draft over the target's ids, shared where both tokenizers write the same token. Raises `PairError` for none."""
    theirs, ours = (_tokens(each) for each in (draft, target))
    sayable = {token: number for token, number in ours.items() if number < target.model.vocab_size}
    target_ids = shared_ids(theirs, sayable, draft.model.vocab_size)
    return TranslatedModel(draft.model, target_ids.to(draft.model.device), _read_as(target, draft))


def _tokens(loaded: LoadedModel) -> dict[str, int]:
    vocabulary = loaded.tokenizer.get_vocab().items()
    return {str(token).translate(_SPACES): int(number) for token, number in vocabulary}


def _read_as(target: LoadedModel, draft: LoadedModel) -> torch.Tensor:
    """The draft's id with the same token, or else the last one of the same text, or else its first id."""
    theirs, readable = _tokens(draft), draft.model.num_embeddings
    ids = [0] * target.model.vocab_size
    for token, number in _tokens(target).items():
        if number >= len(ids):
            continue
        last = [theirs[token]] if token in theirs else text_of(draft).encode(text_of(target).decode([number]))[-1:]
        ids[number] = next((other for other in last if other < readable), 0)
    return torch.tensor(ids, device=draft.model.device)
