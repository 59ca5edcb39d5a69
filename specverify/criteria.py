"""What public engines hold their speculative decoding to today, written anew: to be compared with, never to decide.

Each function says whether a criterion *passes*. None of them has a stated false-alarm rate or a stated smallest effect;
`specverify faults --detection` shows what each sees of planted faults, with the same tokens as the tests of this harness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int

__all__ = [
    "close_acceptance_length",
    "close_kl",
    "close_tv",
    "distance_ratio",
    "enough_acceptance_length",
    "same_texts",
    "within_tolerance",
]

_SIZES = 5
"""Sample sizes, a decade apart, of the distance ratio."""
_REFERENCES = 100
_IMPROVEMENT = 20
_KL_CELLS = 16


def _shares(tokens: Int[np.ndarray, " n"], vocab_size: int) -> Float[np.ndarray, " vocab"]:
    shares: Float[np.ndarray, " vocab"] = np.bincount(tokens, minlength=vocab_size) / max(1, len(tokens))
    return shares


def distance_ratio(tokens: Int[np.ndarray, " n"], law: Float[np.ndarray, " vocab"], *, seed: int = 0) -> bool:
    """VLLM's rejection sampler test: with 10^4 times the samples the empirical law is over 20 times nearer to the target.

    Nearer by the Euclidean distance, and relative to how it moves towards a hundred random laws.
    """
    rng = np.random.default_rng(seed)
    uniforms = rng.random((_REFERENCES, len(law)))
    references = np.exp(uniforms) / np.exp(uniforms).sum(1, keepdims=True)
    to_target, to_references = [], []
    for size in (max(1, len(tokens) // 10**power) for power in reversed(range(_SIZES))):
        shares = _shares(tokens[:size], len(law))
        to_target.append(float(np.linalg.norm(shares - law)))
        to_references.append(float(np.linalg.norm(references - shares)) / _REFERENCES)
    nearer = to_target[0] / max(to_target[-1], 1e-300)
    return nearer > _IMPROVEMENT * to_references[0] / to_references[-1]


def close_kl(tokens: Int[np.ndarray, " n"], regular: Int[np.ndarray, " n"], law: Float[np.ndarray, " vocab"]) -> bool:
    """TensorRT-LLM's rejection sampling test: |KL(target, speculative) - KL(target, regular)| < 0.01, by histograms.

    Over the likeliest ids and all others as one cell: with an empty cell the divergence would be infinite.
    """
    likeliest = np.argsort(-law, kind="stable")[: _KL_CELLS - 1]
    cells = np.full(len(law), len(likeliest))
    cells[likeliest] = np.arange(len(likeliest))
    expected = np.bincount(cells, weights=law)

    def divergence(drawn: Int[np.ndarray, " n"]) -> float:
        observed = np.bincount(cells[drawn], minlength=len(expected)) / len(drawn)
        with np.errstate(divide="ignore"):
            return float((expected * np.log(expected / observed)).sum())

    return abs(divergence(tokens) - divergence(regular)) < 0.01


def close_tv(tokens: Int[np.ndarray, " n"], law: Float[np.ndarray, " vocab"], *, limit: float = 0.2) -> bool:
    """FlashInfer-Bench's sampling evaluator: the empirical law lies within a TV distance of 0.2."""
    return bool(np.abs(_shares(tokens, len(law)) - law).sum() / 2 < limit)


def within_tolerance(tokens: Int[np.ndarray, " n"], law: Float[np.ndarray, " vocab"], *, limit: float = 0.01) -> bool:
    """The histogram tolerance of many sampler tests: no id's share is further than `limit` from its probability."""
    return bool(np.abs(_shares(tokens, len(law)) - law).max() < limit)


def same_texts(on: Sequence[Sequence[int]], off: Sequence[Sequence[int]], *, least: float) -> bool:
    """Greedy texts with and without speculation are the same in more than a share of the prompts (vLLM: 0.6)."""
    same = sum(tuple(one) == tuple(other) for one, other in zip(on, off, strict=True))
    return same >= least * len(on)


def close_acceptance_length(measured: float, baseline: float, *, relative: float = 0.02) -> bool:
    """VLLM's end-to-end test: the mean acceptance length lies within 2 % of the recorded one."""
    return abs(measured - baseline) <= relative * baseline


def enough_acceptance_length(measured: float, baseline: float, *, share: float = 0.95) -> bool:
    """SGLang's end-to-end tests: the mean acceptance length is above a floor, here 95 % of the recorded one."""
    return measured > share * baseline
