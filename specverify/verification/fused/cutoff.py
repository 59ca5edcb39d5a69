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

__all__ = ["cut_off", "least_kept"]

_CANDIDATES = 256


def cut_off(
    scores: Float[Tensor, " vocab"], params: SamplingParams, *, out: Float[Tensor, " vocab"]
) -> Float[Tensor, " vocab"]:
    """-inf in place of the scores that the parameters cut off; `scores` themselves where there is nothing to cut."""
    least = least_kept(scores, params)
    if least == -math.inf:
        return scores
    below = float(torch.nextafter(torch.tensor(least), torch.tensor(-math.inf)))  # `threshold` keeps what lies above
    return torch.threshold(scores, below, -math.inf, out=out)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks `out`


def least_kept(scores: Float[Tensor, " vocab"], params: SamplingParams) -> float:
    """The least score that top-k, then top-p, then min-p leave; -inf where they cut nothing."""
    least = -math.inf
    if 0 < params.top_k < len(scores):
        least = float(scores.topk(params.top_k).values[-1])
    if params.top_p < 1:
        least = max(least, _least_of_top_p(scores, least, params.top_p))
    if params.min_p:
        least = max(least, float(scores.amax()) + math.log(params.min_p))
    return least


def _least_of_top_p(scores: Float[Tensor, " vocab"], least: float, top_p: float) -> float:
    """The score at which the mass from the largest down reaches `top_p` of what top-k left."""
    log_sum = float((scores if least == -math.inf else scores[scores >= least]).logsumexp(-1))
    count = _CANDIDATES
    while True:
        largest = scores.topk(min(count, len(scores))).values.double()
        mass = (largest - log_sum).exp().cumsum(-1)
        enough = int(torch.searchsorted(mass, torch.tensor(top_p, dtype=torch.float64)))
        if enough < len(largest):
            return float(largest[enough])
        if len(largest) == len(scores):
            return float(largest[-1])
        count *= 8
