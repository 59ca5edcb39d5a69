"""Logits to next-token probabilities: the only definition, used for target and draft alike.

transformers' own logits processors do the work, in the order in which `generate` applies them. What depends on the
prefix (penalties, no-repeat, minimum length, banned sequences) sees the prompt, what was emitted, and the drafted tokens
before the position.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specverify.errors import NonFiniteLogits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.records import SamplingParams

__all__ = ["probabilities", "processors"]


def probabilities(
    logits: Float[Tensor, "batch n vocab"],
    params: Sequence[SamplingParams],
    *,
    token_ids: Int[Tensor, "batch length"],
    prefix_lengths: Int[Tensor, "batch n"],
    prompt_lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch n vocab"]:
    """The law of the next token after the first `prefix_lengths[b, i]` of each row's `token_ids`, float64.

    At temperature 0 it is a point mass on the largest processed logit, ties to the lowest id.
    Raises `NonFiniteLogits` where processing leaves a row without any token.
    """
    groups: dict[SamplingParams, list[int]] = {}
    for row, its in enumerate(params):
        groups.setdefault(_without_endings(its), []).append(row)
    if len(groups) == 1:
        return _laws_of(logits, next(iter(groups)), token_ids, prefix_lengths, prompt_lengths)
    law = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    for group, rows in groups.items():
        at = torch.tensor(rows, device=logits.device)
        law[at] = _laws_of(logits[at], group, token_ids[at], prefix_lengths[at], prompt_lengths[at])
    return law


def _laws_of(
    logits: Float[Tensor, "batch n vocab"],
    params: SamplingParams,
    token_ids: Int[Tensor, "batch length"],
    prefix_lengths: Int[Tensor, "batch n"],
    prompt_lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch n vocab"]:
    """Of rows that have the same parameters."""
    if params.prefix_dependent:
        scores = _after_each_prefix(logits, params, token_ids, prefix_lengths, prompt_lengths)
    else:
        flat = _at_least_float32(logits).reshape(-1, logits.shape[-1])
        scores = _processed(flat, params, token_ids[:1, :0].expand(len(flat), 0)).view_as(logits)
    _require_a_token(scores)
    return _point_mass(scores) if params.greedy else scores.double().softmax(-1)


@lru_cache(maxsize=4096)
def _without_endings(params: SamplingParams) -> SamplingParams:
    """Parameters with the same law: most endings don't enter it, so rows that differ in them go together."""
    eos = params.eos_token_ids if params.min_new_tokens or params.banned_token_ids else ()
    return replace(params, max_new_tokens=0, eos_token_ids=eos, stop_token_ids=(), stop_strings=())


@lru_cache(maxsize=4096)
def processors(
    params: SamplingParams, prompt_length: int = 0, *, vocab_size: int = 0, device: str = "cpu"
) -> LogitsProcessorList:
    """Transformers' processors for these parameters, in `generate`'s order.

    Some keep tensors of the first vocabulary and device that they see, so these are part of what is remembered.
    """
    del vocab_size
    eos = list(params.eos_token_ids)
    banned = [list(ids) for ids in params.banned_token_ids if list(ids) not in [[token] for token in eos]]
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.no_repeat_ngram_size:
        chain.append(hf.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if banned:
        chain.append(hf.NoBadWordsLogitsProcessor(banned))
    if params.min_new_tokens and eos:
        chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, eos, device=device))
    if params.greedy:
        return chain
    if params.temperature != 1:
        chain.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    return chain


def _processed(
    scores: Float[Tensor, "rows vocab"],
    params: SamplingParams,
    prefixes: Int[Tensor, "rows length"],
    prompt_length: int = 0,
) -> Float[Tensor, "rows vocab"]:
    """Scores after each processor in turn; calling the list itself inspects every signature anew."""
    for processor in processors(params, prompt_length, vocab_size=scores.shape[-1], device=str(scores.device)):
        scores = processor(prefixes, scores)
    return scores


def _after_each_prefix(
    logits: Float[Tensor, "batch n vocab"],
    params: SamplingParams,
    token_ids: Int[Tensor, "batch length"],
    prefix_lengths: Int[Tensor, "batch n"],
    prompt_lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch n vocab"]:
    """Processed scores where the processors read the prefix: rows of equal prefix and prompt length go together."""
    scores = _at_least_float32(logits).clone()
    if not params.min_new_tokens:
        prompt_lengths = torch.zeros_like(prompt_lengths)  # nothing else asks where the prompt ends
    keys = torch.stack((prefix_lengths, prompt_lengths[:, None].expand_as(prefix_lengths)), -1)  # [B, n, 2]
    for length, prompt_length in keys.reshape(-1, 2).unique(dim=0).tolist():
        row, n = ((keys[..., 0] == length) & (keys[..., 1] == prompt_length)).nonzero(as_tuple=True)
        scores[row, n] = _processed(scores[row, n], params, token_ids[row, :length], prompt_length)
    return scores


def _at_least_float32(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Half precision is widened before anything is divided by a temperature."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _require_a_token(scores: Float[Tensor, "batch n vocab"]) -> None:
    largest = scores.amax(-1)
    if not largest.numel():
        return
    least, most = largest.aminmax()
    if not -math.inf < float(least) <= float(most) < math.inf:
        msg = "the sampling parameters leave no token that may be emitted; loosen the bans or the minimum length"
        raise NonFiniteLogits(msg)


def _point_mass(scores: Float[Tensor, "batch n vocab"]) -> Float[Tensor, "batch n vocab"]:
    """One-hot on the largest score; `argmax` promises no order among ties, so the lowest id is taken explicitly."""
    vocab_size = scores.shape[-1]
    largest = scores.amax(-1, keepdim=True)
    ids = torch.arange(vocab_size, device=scores.device)
    best = torch.where(scores == largest, ids, vocab_size).amin(-1)
    return torch.nn.functional.one_hot(best, vocab_size).double()
