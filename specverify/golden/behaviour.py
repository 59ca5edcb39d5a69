"""The behaviour layer: do the recorded samples still follow the target, under its present parameters?

A recorded text is a sample of the old law. If the law is the same, its PIT values under the present target are uniform,
so the e-process over them is evidence at any time that it is another, and the run's false-alarm rate bounds it
(Note [PIT], Note [e-process]).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from specverify.checks.evidence import e_process
from specverify.golden.decoder import requests_of_samples
from specverify.golden.records import Behaviour
from specverify.records import DecodeTrace, FinishReason
from specverify.scoring import score

if TYPE_CHECKING:
    from specverify.golden.decoder import Asked
    from specverify.golden.records import Golden
    from specverify.models.loading import Pair
    from specverify.records import SamplingParams

__all__ = ["behaviour_of"]

_EDGE = 1.0
"""Logits outside the support from which on a token is called impossible, not a matter of rounding."""


def behaviour_of(pair: Pair, old: Golden, asked: Asked, params: SamplingParams) -> Behaviour:
    """Score the recorded samples under the present target with `params`, the present ones."""
    now = replace(params, max_new_tokens=old.max_new_tokens, eos_token_ids=asked.eos_token_ids)
    recorded = {prompt.prompt.id: prompt.decoded.sampled for prompt in old.prompts}
    traces = [
        DecodeTrace(
            request=replace(request, params=now), sample=number, token_ids=sample.token_ids, finish=FinishReason.LENGTH
        )
        for request in requests_of_samples(asked)
        for number, sample in enumerate(recorded[request.prompt_id])
    ]
    lost = [sample for name, samples in recorded.items() if name not in asked.prompts for sample in samples]
    unread = sum(len(sample.token_ids) for sample in lost)
    unread += sum(len(trace.token_ids) for trace in traces if not _readable(trace, pair))
    scored = score([trace for trace in traces if _readable(trace, pair)], target=pair.target.model)
    if not len(scored):
        return Behaviour(log10_e=math.inf, likeliest="unreadable ids", num_tokens=unread, num_impossible=unread)
    inside = scored.where(scored["edge"] <= 0)
    process = e_process(inside)
    impossible = int((scored["edge"] > _EDGE).sum()) + unread
    return Behaviour(
        log10_e=math.inf if impossible else process.log10_max,
        likeliest=process.likeliest,
        num_tokens=len(scored) + unread,
        num_impossible=impossible,
    )


def _readable(trace: DecodeTrace, pair: Pair) -> bool:
    """Whether the present target has every id of it."""
    ids = trace.request.prompt_ids + trace.token_ids
    return max(ids) < min(pair.target.model.vocab_size, pair.target.model.num_embeddings)
