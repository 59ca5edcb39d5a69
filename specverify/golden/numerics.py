"""The numerics layer, captured: teacher-forced log-probabilities over recorded ids, and the noise that they have here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.noise import measured_noise
from specverify.golden.records import NoiseFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from numpy import ndarray

    from specverify.models import LanguageModel

__all__ = ["TOP_K", "Laws", "laws_at", "noise_facts", "positions_of"]

TOP_K = 16
"""Most probable tokens whose log-probability is recorded at each position; the rest is one number."""
_PROMPT_POSITIONS = 12
"""Positions inside a prompt, evenly spread; of the greedy text every one is recorded."""


@dataclass(frozen=True, eq=False)
class Laws:
    """The laws at the recorded positions of one text."""

    ids: Int[ndarray, "positions k"]
    logprobs: Float[ndarray, "positions k"]
    """Of those ids."""
    best: Int[ndarray, " positions"]
    """The most probable id, ties to the lowest."""
    margin: Float[ndarray, " positions"]
    """Largest minus second largest logit."""
    token_logprobs: Float[ndarray, " positions"]
    """Of the token that stands there."""


def positions_of(prompt_length: int, length: int) -> tuple[int, ...]:
    """Places whose law is recorded: a few of the prompt, all after it; the first token follows nothing."""
    inside = np.unique(np.linspace(1, max(prompt_length - 1, 1), _PROMPT_POSITIONS).round().astype(int))
    places = {int(place) for place in inside if 0 < place < prompt_length}
    return tuple(sorted(places | set(range(max(prompt_length, 1), length))))


@torch.inference_mode()
def laws_at(
    target: LanguageModel,
    text: Sequence[int],
    positions: Sequence[int],
    ids: Int[ndarray, "positions k"] | None = None,
) -> Laws:
    """One pass over `text`; the laws of the tokens at `positions`, for the given ids or for the most probable ones."""
    logits = target.logits([list(text[:-1])])[0].double()[torch.tensor(positions, device=target.device) - 1]  # [P, V]
    logprobs = logits.log_softmax(-1)
    top = logits.topk(min(TOP_K, logits.shape[-1]), -1)
    chosen = top.indices if ids is None else torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    known = chosen.clamp(max=logits.shape[-1] - 1)  # a smaller vocabulary has no such id
    values = torch.where(chosen < logits.shape[-1], logprobs.gather(-1, known), -torch.inf)
    stands = torch.tensor([text[place] for place in positions], device=logits.device).clamp(max=logits.shape[-1] - 1)
    return Laws(
        ids=chosen.cpu().numpy().astype(np.int32),
        logprobs=values.cpu().numpy().astype(np.float32),
        best=logits.argmax(-1).cpu().numpy().astype(np.int32),
        margin=(top.values[:, 0] - top.values[:, 1]).cpu().numpy().astype(np.float32),
        token_logprobs=logprobs.gather(-1, stands[:, None])[:, 0].cpu().numpy().astype(np.float32),
    )


def noise_facts(target: LanguageModel, texts: Sequence[Sequence[int]], *, chunk: int) -> NoiseFacts:
    """The noise of execution shapes over a few texts, the shortest ones: it takes a pass for each token."""
    noise = measured_noise(target, sorted(texts, key=len)[:4], chunk=chunk)
    return NoiseFacts(largest=noise.largest, margin_sd=noise.margin_sd, num_positions=noise.num_positions)
