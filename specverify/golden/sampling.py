"""The sampling layer, captured: the generation configuration, and what the processors make of fixed logits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specverify.checks.compatibility import eos_ids
from specverify.golden.records import GenerationFacts
from specverify.golden.weights import IGNORED_KEYS
from specverify.models.loading import folder_of
from specverify.plan import PARAMETER_GRID
from specverify.records import SamplingParams
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

    from specverify.models.loading import LoadedModel

__all__ = ["PROCESSOR_CELLS", "generation_facts", "processed_laws"]

_EFFECTIVE = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
)
"""What decides a text; compared as the library reads it, so that a new default of its own shows."""

_VOCAB = 64
PROCESSOR_CELLS: tuple[tuple[str, SamplingParams], ...] = (
    ("plain", SamplingParams()),
    *((name, params) for name, params in PARAMETER_GRID if name != "banned_words"),
    ("banned", SamplingParams(banned_token_ids=((3,), (7, 11)))),
    ("minimum_length", SamplingParams(min_new_tokens=8, eos_token_ids=(2,))),
)
"""Parameters under which the processors are held against what they made of the same logits."""


def generation_facts(loaded: LoadedModel) -> GenerationFacts:
    """What the files state, what the library makes of it, and the parameters that sampled texts are recorded with."""
    stated = _stated(loaded)
    return GenerationFacts(
        stated=stated,
        effective=_effective(loaded),
        eos_token_ids=eos_ids(loaded),
        params=_params({key: json.loads(value) for key, value in stated.items()}),
    )


def _stated(loaded: LoadedModel) -> dict[str, str]:
    folder = folder_of(loaded.source)
    known: dict[str, Any] = {}
    if folder is not None:
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                table = json.loads((folder / name).read_text("utf-8"))
                known |= {key: value for key, value in table.items() if name[0] == "g" or key.endswith("token_id")}
    elif loaded.generation_config is not None:
        known = loaded.generation_config.to_diff_dict()
    return {
        key: json.dumps(value, sort_keys=True, default=str)
        for key, value in sorted(known.items())
        if key not in IGNORED_KEYS and not key.startswith("_") and value is not None
    }


def _effective(loaded: LoadedModel) -> dict[str, str]:
    config = loaded.generation_config
    values = {key: getattr(config, key, None) for key in _EFFECTIVE}
    return {key: json.dumps(value, default=str) for key, value in values.items() if value is not None}


def _params(stated: dict[str, Any]) -> SamplingParams:
    """The stated parameters; what nobody states is left as the model says it, whatever a library's default is."""
    return SamplingParams(
        temperature=float(stated.get("temperature") or 1.0),
        top_k=int(stated.get("top_k") or 0),
        top_p=float(stated.get("top_p") or 1.0),
        min_p=float(stated.get("min_p") or 0.0),
        repetition_penalty=float(stated.get("repetition_penalty") or 1.0),
        no_repeat_ngram_size=int(stated.get("no_repeat_ngram_size") or 0),
    )


def processed_laws() -> Float[ndarray, "cells vocab"]:
    """The law of each of `PROCESSOR_CELLS` on the same logits after the same prefix; no model is asked."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=_VOCAB) * 2).float()
    prefix = torch.tensor([[5, 9, 5, 9, 7, 5, 1, 7]])
    laws = [
        probabilities(
            logits[None, None],
            [params],
            token_ids=prefix,
            prefix_lengths=torch.tensor([[prefix.shape[1]]]),
            prompt_lengths=torch.tensor([4]),
        )[0, 0]
        for _, params in PROCESSOR_CELLS
    ]
    return np.array(torch.stack(laws).numpy(), dtype=np.float64)
