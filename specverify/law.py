"""Exact laws on small tables: what the unchanged decoder emits, and what the target alone would emit.

`decoded_law` drives the real loop over every path; `autoregressive_law` is written independently of it, in NumPy, as a
product of conditionals. Where the two agree to 1e-12 the decoder is lossless on that instance, and no statistics enter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.choices.enumerate import Enumerate, every_path
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.records import DecodeRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specverify.models.table import TableModel

__all__ = ["autoregressive_law", "decoded_law", "total_variation"]

Law = dict[tuple[int, ...], float]
"""Emitted ids to probability."""


def decoded_law(decoder: Decoder, *, max_new_tokens: int, eos_token_ids: tuple[int, ...] = ()) -> Law:
    """The law of everything that a whole speculative decode emits after the one-token prompt 0, exactly."""
    params = SamplingParams(max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
    request = DecodeRequest(id="law", prompt_ids=(0,), params=params)
    law: Law = {}

    def program(choices: Enumerate) -> torch.Tensor:
        rows = [Row(request, path) for path in range(len(choices.records))]
        for trace in speculative(replace(decoder, choices=lambda _: choices), rows):
            emitted[trace.sample] = trace.token_ids
        return torch.arange(len(rows))

    emitted: dict[int, tuple[int, ...]] = {}
    for paths, weights in every_path(program):
        for path, weight in zip(paths.tolist(), weights.tolist(), strict=True):
            law[emitted[path]] = law.get(emitted[path], 0.0) + weight
    return law


def autoregressive_law(target: TableModel, *, max_new_tokens: int, eos_token_ids: tuple[int, ...] = ()) -> Law:
    """The law of everything that the target alone emits after the one-token prompt 0: a product of conditionals."""
    law: Law = {(): 1.0}
    for _ in range(max_new_tokens):
        longer: Law = {}
        for emitted, weight in law.items():
            if emitted and emitted[-1] in eos_token_ids:
                longer[emitted] = weight
                continue
            conditional = np.exp(target.row((0, *emitted)).numpy())
            for token, probability in enumerate(conditional / conditional.sum()):
                if probability > 0:
                    longer[*emitted, token] = weight * float(probability)
        law = longer
    return law


def total_variation(first: Mapping[tuple[int, ...], float], second: Mapping[tuple[int, ...], float]) -> float:
    """Half the summed absolute difference."""
    return sum(abs(first.get(ids, 0.0) - second.get(ids, 0.0)) for ids in {*first, *second}) / 2
