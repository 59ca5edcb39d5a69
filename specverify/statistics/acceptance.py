"""How many tokens a speculative step will emit, from any transcript of the target: an exact dynamic programme.

Note [Posterior acceptance]: a lossless stream doesn't depend on how it was cut into blocks, so given the emitted token
x the probability that it was an accepted draft is min(1, q/p)(x). One teacher-forced pass over text that the target has
written therefore predicts every number of speculative tokens at once, without one speculative run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float

__all__ = [
    "SpeedPrediction",
    "best_num_speculative_tokens",
    "geometric_tokens_per_step",
    "speedup",
    "tokens_per_step",
]


def tokens_per_step(
    posterior_acceptance: Float[np.ndarray, " tokens"], num_speculative_tokens: int, boundaries: Sequence[int] = ()
) -> float:
    """Expected tokens that a draft-and-verify step emits over these transcripts, laid end to end.

    `posterior_acceptance` is min(1, q/p) of each emitted token; `boundaries` are the places at which another transcript
    begins, as `numpy.split` takes them. State j of the programme is the probability that the next token is number j of
    its block: an accepted draft moves to j + 1; a replaced one, and the bonus after g drafts, opens the next block. A
    step is counted where its block opens, so the block that the end of a transcript cuts off counts, too.

    >>> tokens_per_step(np.ones(8), 3)
    4.0
    """
    if not ((posterior_acceptance >= 0) & (posterior_acceptance <= 1)).all() or num_speculative_tokens < 0:
        msg = "a posterior acceptance must lie in [0, 1], and a number of speculative tokens be at least 0"
        raise InternalError(msg)
    if not len(posterior_acceptance):
        return float("nan")
    transcripts = [part for part in np.split(posterior_acceptance, list(boundaries)) if len(part)]
    transcripts.sort(key=len, reverse=True)
    accept = np.zeros((len(transcripts), len(transcripts[0])))
    for row, part in enumerate(transcripts):
        accept[row, : len(part)] = part
    lengths = np.array([len(part) for part in transcripts])
    state = np.zeros((len(transcripts), num_speculative_tokens + 1))
    state[:, 0] = 1.0
    steps = 0.0
    for token in range(accept.shape[1]):
        live = int((lengths > token).sum())  # the longest come first
        state = state[:live]
        steps += float(state[:, 0].sum())
        accepted = state[:, :-1] * accept[:live, token, None]
        state = np.concatenate((1 - accepted.sum(1, keepdims=True), accepted), axis=1)
    return len(posterior_acceptance) / steps


def geometric_tokens_per_step(acceptance: float, num_speculative_tokens: int) -> float:
    """(1 - a^(g+1)) / (1 - a), the formula of the papers [Leviathan2023, Eq. 1]: for comparison, not for prediction.

    It takes every position for equally hard. With a = mean Σ min(p, q) it over-predicts by 4-7 % on text whose
    difficulty comes in stretches: hard stretches own more blocks than their share of tokens, so blocks meet harder
    positions than the mean token does. With a = accepted / drafted it is 25-55 % too low: that rate already counts the
    drafts behind a rejection.

    >>> geometric_tokens_per_step(1.0, 3)
    4.0
    """
    return float(sum(acceptance**accepted for accepted in range(num_speculative_tokens + 1)))


def speedup(tokens_per_step: float, *, num_speculative_tokens: int, draft_cost: float, verify_cost: float) -> float:
    """Tokens per unit of time over those of the target alone: tokens per step / (g · draft + verify).

    Costs are in units of one decoding step of the target alone: of one draft token, and of verifying a whole block.
    """
    return tokens_per_step / (num_speculative_tokens * draft_cost + verify_cost)


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """What a number of speculative tokens is predicted to give."""

    num_speculative_tokens: int
    tokens_per_step: float
    speedup: float


def best_num_speculative_tokens(
    posterior_acceptance: Float[np.ndarray, " tokens"],
    boundaries: Sequence[int] = (),
    *,
    draft_cost: float,
    verify_cost: Callable[[int], float],
    most: int = 16,
) -> tuple[SpeedPrediction, tuple[SpeedPrediction, ...]]:
    """The fastest prediction, and all of them from 0 (the target alone, 1 by definition) to `most` speculative tokens.

    `verify_cost(g)` is the cost of verifying g drafts at once, in units of one decoding step of the target alone.
    """
    predictions = [SpeedPrediction(num_speculative_tokens=0, tokens_per_step=1.0, speedup=1.0)]
    for number in range(1, most + 1):
        tokens = tokens_per_step(posterior_acceptance, number, boundaries)
        gain = speedup(tokens, num_speculative_tokens=number, draft_cost=draft_cost, verify_cost=verify_cost(number))
        predictions.append(SpeedPrediction(num_speculative_tokens=number, tokens_per_step=tokens, speedup=gain))
    return max(predictions, key=lambda prediction: prediction.speedup), tuple(predictions)
