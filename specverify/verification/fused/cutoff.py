"""Top-k, top-p and min-p as one number a row: the least score that may be emitted.

A threshold needs no sort of the vocabulary: a few hundred candidates decide top-p unless the law is flat. Ids that tie
with the last one kept are all kept; transformers keeps some of them, in the order of its sort.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from specverify.records import SamplingParams

__all__ = ["cut_off", "cuts", "least_kept"]

_CANDIDATES = 256


def cuts(params: SamplingParams) -> bool:
    """Whether these parameters cut anything off."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def cut_off(
    scores: Float[Tensor, " vocab"], params: SamplingParams, *, out: Float[Tensor, " vocab"]
) -> Float[Tensor, " vocab"]:
    """-inf in place of the scores that the parameters cut off; `scores` themselves where there is nothing to cut."""
    if not cuts(params):
        return scores
    below = torch.nextafter(least_kept(scores, params), torch.tensor(-math.inf))  # `threshold` keeps what lies above
    return torch.threshold(scores, float(below), -math.inf, out=out)


def least_kept(scores: Float[Tensor, "*rows vocab"], params: SamplingParams) -> Float[Tensor, "*rows"]:
    """The least score that top-k, then top-p, then min-p leave; -inf where they cut nothing."""
    least = scores.new_full(scores.shape[:-1], -math.inf)
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k).values[..., -1]
    if params.top_p < 1:
        least = torch.maximum(least, _least_of_top_p(scores, least, params))
    if params.min_p:
        least = torch.maximum(least, scores.amax(-1) + math.log(params.min_p))
    return least


def _least_of_top_p(
    scores: Float[Tensor, "*rows vocab"], least: Float[Tensor, "*rows"], params: SamplingParams
) -> Float[Tensor, "*rows"]:
    """The score at which the mass from the largest down reaches `top_p` of what top-k left."""
    vocab_size = scores.shape[-1]
    kept = scores if not params.top_k else torch.where(scores >= least[..., None], scores, -math.inf)
    log_sum, count = kept.logsumexp(-1, keepdim=True).double(), _CANDIDATES
    wanted = torch.full_like(log_sum, params.top_p)
    while True:
        largest = kept.topk(min(count, vocab_size)).values
        mass = (largest.double() - log_sum).exp().cumsum(-1)
        enough = torch.searchsorted(mass, wanted)  # the first at which the mass is reached
        last = largest.shape[-1] - 1
        if last == vocab_size - 1 or bool((enough <= last).all()):
            return largest.gather(-1, enough.clamp(max=last))[..., 0]
        count *= 8
