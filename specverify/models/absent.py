"""A model of which only the tokenizer and the configuration are here: its weights are somewhere else, or too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from specverify.errors import PairError, PlanError
from specverify.models.loading import LoadedModel, folder_of
from specverify.models.transformers import stated_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from specverify.models import Session
    from specverify.models.transformers import TransformersModel

__all__ = ["Absent", "load_without_weights"]


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A `LanguageModel` that knows its sizes, and raises `PlanError` where its law is asked."""

    name: str
    vocab_size: int
    max_length: int
    num_parameters: int = 0

    @property
    def device(self) -> torch.device:
        """Where nothing is computed."""
        return torch.device("cpu")

    @property
    def num_embeddings(self) -> int:
        """As many as it can say."""
        return self.vocab_size

    def open(self, prompts: Sequence[Sequence[int]]) -> Session:
        """Not possible."""
        del prompts
        raise PlanError(self._missing())

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """Not possible."""
        del sequences
        raise PlanError(self._missing())

    def _missing(self) -> str:
        return f"the target {self.name} isn't loaded, so this can't be asked of it; leave --score-by out"


def load_without_weights(source: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Tokenizer and configurations of a folder or a hub name. Raises `PairError` where they can't be read."""
    where = str(folder_of(source) or source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(where, **options)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, ImportError) as error:
        msg = f"the tokenizer and configuration of {source} can't be read: {' '.join(str(error).split())[:200]}"
        raise PairError(msg) from error
    try:
        generation = GenerationConfig.from_pretrained(where)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    sizes = config.get_text_config()
    absent = Absent(name=source, vocab_size=int(sizes.vocab_size), max_length=stated_length(sizes))
    return LoadedModel(cast("TransformersModel", absent), tokenizer, config, generation, source)
