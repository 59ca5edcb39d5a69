"""The decoder layer, captured: recorded prompts under recorded parameters through the reference decoder, and its steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import derived_seed
from specverify.decoding import Decoder
from specverify.drafting import PromptLookup, drafter_for
from specverify.engines.reference import ReferenceEngine
from specverify.golden.records import DecodedPrompt, DecodedSample
from specverify.records import DecodeRequest, DecodeTrace, SamplingParams, count
from specverify.scoring import score
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from specverify.engines import Engine
    from specverify.models.loading import Pair

__all__ = ["SAMPLES", "Asked", "Decoded", "decoded", "engine_of"]

SAMPLES = 4
"""Sampled texts a prompt."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the decoder is asked: the same of a recording and of every later check."""

    prompts: Mapping[str, tuple[int, ...]]
    """Prompt id to token ids."""
    domains: Mapping[str, str]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What it answered."""

    prompts: Mapping[str, DecodedPrompt]
    acceptance_rate: float
    expected_acceptance: float
    sampled: tuple[DecodeTrace, ...]


def engine_of(pair: Pair, num_speculative_tokens: int) -> ReferenceEngine:
    """The reference decoder with the chain rule: the draft model's drafts, or prompt lookup where there is none."""
    target = pair.target.model
    decoder = Decoder(
        target=target,
        drafter=PromptLookup(target.vocab_size)
        if pair.draft is None
        else drafter_for(Drafts.CHAIN, pair.draft.model, target.vocab_size),
        num_speculative_tokens=num_speculative_tokens,
    )
    return ReferenceEngine(decoder, batch_size=64)


def decoded(engine: Engine, pair: Pair, asked: Asked) -> Decoded:
    """Greedy without and with speculation, and sampled with it; acceptance of the sampled texts."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=asked.max_new_tokens, eos_token_ids=asked.eos_token_ids)
    alone = list(engine.decode(_requests(asked, greedy, "greedy", speculation=False)))
    fast = list(engine.decode(_requests(asked, greedy, "greedy")))
    sampled = list(engine.decode(requests_of_samples(asked)))
    samples: dict[str, list[DecodedSample]] = defaultdict(list)
    for trace in sampled:
        samples[trace.request.prompt_id].append(_sample(trace))
    overlap, owners = _overlap(pair, sampled)
    prompts = {
        one.request.prompt_id: DecodedPrompt(
            target_only=one.token_ids,
            greedy=_sample(other),
            sampled=tuple(samples[one.request.prompt_id]),
            expected_acceptance=_mean(overlap[owners == one.request.prompt_id]),
        )
        for one, other in zip(alone, fast, strict=True)
    }
    return Decoded(
        prompts=prompts,
        acceptance_rate=count(sampled).acceptance_rate,
        expected_acceptance=_mean(overlap),
        sampled=tuple(sampled),
    )


def requests_of_samples(asked: Asked) -> list[DecodeRequest]:
    """The requests behind the sampled texts; scoring recorded texts asks under the same names."""
    params = replace(asked.params, max_new_tokens=asked.max_new_tokens, eos_token_ids=asked.eos_token_ids)
    return _requests(asked, params, "sampled", num_samples=SAMPLES)


def _requests(
    asked: Asked, params: SamplingParams, purpose: str, *, num_samples: int = 1, speculation: bool = True
) -> list[DecodeRequest]:
    return [
        DecodeRequest(
            id=f"golden/{purpose}/{name}",
            prompt_ids=ids,
            params=params,
            seed=derived_seed(asked.seed, "golden", purpose, name),
            num_samples=num_samples,
            speculation=speculation,
            prompt_id=name,
            domain=asked.domains.get(name, ""),
        )
        for name, ids in asked.prompts.items()
    ]


def _sample(trace: DecodeTrace) -> DecodedSample:
    return DecodedSample(
        token_ids=trace.token_ids,
        drafted=tuple(step.num_draft_tokens for step in trace.steps),
        accepted=tuple(step.num_accepted_tokens for step in trace.steps),
    )


def _overlap(pair: Pair, sampled: Sequence[DecodeTrace]) -> tuple[NDArray[np.float64], NDArray[np.str_]]:
    """Σ min(p, q) of each sampled token, and the prompt that it belongs to."""
    if pair.draft is None:
        return np.empty(0), np.empty(0, np.str_)
    scored = score(sampled, target=pair.target.model, draft=pair.draft.model)
    names = np.array([trace.request.prompt_id for trace in sampled], dtype=np.str_)
    return scored["overlap"], names[scored["trace"].astype(np.int64)] if len(scored) else names[:0]


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
