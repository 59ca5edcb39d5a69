"""Do the texts of two arms follow one law? By differences of scores, or, where there is nothing but text, by MMD.

Note [Exchangeable arms]: if two arms of an engine follow one law, the texts X and Y that they write after the same prompt
with different seeds may be swapped without changing anything. So for *any* score f the difference f(X) - f(Y) is as likely
as its negative, whatever the law, the kernels' rounding, and whether the model that gives f its meaning is the right one.
That alone makes all tests here exact: the bets on the signs at every time, the permutations at every number of texts.

Note [Learned score]: so f may have been learned from earlier pairs. The witness of the MMD is such an f: how much more a text has
in common with the texts of the first arm than with those of the second. Where the arms differ it comes to say so, and bets on
its signs are an MMD that may be looked at after each pair [ShekharRamdas2024] and reaches a proof without a permutation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from specverify.errors import InternalError
from specverify.statistics.design import require_rate

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from jaxtyping import Bool, Float, Shaped

__all__ = [
    "MMD",
    "bigram_gram",
    "bigrams",
    "hamming_gram",
    "mmd",
    "samples_needed_signs",
    "sign_bets",
    "smallest_detectable_signs",
    "witness_differences",
]

_TILTS = (0.1, 0.3, 1.0, 3.0)
"""Bets in units of the differences' own spread."""
_LN10 = math.log(10)
_MOST_PAIRS = 1e15


def sign_bets(differences: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
    """Bets on "the first of a pair scores more" and on "less", mixed evenly, as a path of log10 e.

    Given its size a difference of exchangeable texts has either sign with probability ½, so exp(x) / cosh(x) has
    expectation 1 for any multiple x of it [DeLaPena1999]. The multiple is a tilt over the root mean square so far, which
    looks at sizes only. Raises `InternalError` for a difference that isn't finite.
    """
    if not np.isfinite(differences).all():
        msg = "a difference of scores must be finite"
        raise InternalError(msg)
    if not len(differences):
        return np.empty(0)
    mean_square = np.cumsum(differences**2) / np.arange(1, len(differences) + 1)
    scaled = np.divide(differences, np.sqrt(mean_square), out=np.zeros(len(differences)), where=mean_square > 0)
    paths = []
    for tilt in (*_TILTS, *(-tilt for tilt in _TILTS)):
        x = tilt * scaled
        paths.append(np.cumsum(x - np.logaddexp(x, -x) + math.log(2)))
    total: Float[np.ndarray, " pairs"] = np.logaddexp.reduce(paths) - math.log(len(paths))
    return total / _LN10


def bigrams(ids: Sequence[int], *, prompt: str = "") -> Counter[Hashable]:
    """How often each id stands after each other one (after none: at the beginning), told apart by prompt where one is given."""
    return Counter((prompt, before, after) for before, after in zip((None, *ids), ids, strict=False))


def witness_differences(
    first: Sequence[Mapping[Hashable, float]], second: Sequence[Mapping[Hashable, float]]
) -> Float[np.ndarray, " pairs"]:
    """How much more the first text of each pair is like earlier first ones than the second is (Note [Learned score]).

    Texts are given as the features of a kernel, k(x, y) = Σ x_f y_f; the witness before a pair is Σ k(X, ·) - k(Y, ·) over those
    before it, over the root of their number, so that chance moves it no further as it grows.
    """
    witness: Counter[Hashable] = Counter()
    differences = np.zeros(len(first))
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        change = {each: ours.get(each, 0) - theirs.get(each, 0) for each in {**ours, **theirs}}
        differences[number] = sum(witness[each] * by for each, by in change.items()) / math.sqrt(max(1, number))
        for each, by in change.items():
            witness[each] += by  # type: ignore[assignment]  # a kernel's features need not be whole numbers
    return differences


def samples_needed_signs(effect: float, *, false_fail_rate: float, false_pass_rate: float) -> int:
    """Pairs until `sign_bets` reliably reach 1/rate, where differences of root mean square 1 have the mean `effect`.

    Reckoned for normal differences: a bet's log has then a mean and a spread for each tilt, and the best tilt is counted.
    """
    require_rate(false_fail_rate, false_pass_rate)
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    x = np.multiply.outer(_TILTS, effect + math.sqrt(max(0.0, 1 - effect**2)) * nodes)
    won = x - np.logaddexp(x, -x) + math.log(2)
    mean = won @ weights / weights.sum()
    spread = np.sqrt(np.maximum(won**2 @ weights / weights.sum() - mean**2, 0))
    wanted = math.log(2 * len(_TILTS)) - math.log(false_fail_rate)
    z = float(special.ndtri(1 - false_pass_rate)) * spread
    with np.errstate(divide="ignore"):
        root = np.where(mean > 0, (z + np.sqrt(z**2 + 4 * mean.clip(0) * wanted)) / (2 * mean.clip(0)), np.inf)
    return max(1, math.ceil(min(float(root.min()) ** 2, _MOST_PAIRS)))


def smallest_detectable_signs(num_pairs: int, *, false_fail_rate: float, false_pass_rate: float) -> float:
    """The mean difference, in units of its root mean square, that so many pairs reliably show; infinite where none would."""
    low, high = 0.0, 1.0

    def needed(effect: float) -> int:
        return samples_needed_signs(effect, false_fail_rate=false_fail_rate, false_pass_rate=false_pass_rate)

    if needed(high) > num_pairs:
        return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= num_pairs else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class MMD:
    """Outcome of a permutation test of the maximum mean discrepancy."""

    statistic: float
    """Σ ± k(x, y) over pairs of texts after the same prompt, + within an arm and - across."""
    p_value: float
    """Exact; never below 1 / (resamples + 1)."""
    num_texts: int


def mmd(
    gram: Float[np.ndarray, "n n"],
    second: Bool[np.ndarray, " n"],
    prompts: Shaped[np.ndarray, " n"],
    *,
    resamples: int = 999,
    seed: int = 0,
) -> MMD:
    """Whether two arms differ, by a kernel of the texts [Gao2025]: arms are permuted within each prompt.

    Of all tests here the weakest: 60 to 250 times the tokens that scores need. For engines of which nothing else is known.
    """
    same_prompt = prompts[:, None] == prompts[None, :]
    kernel = np.where(same_prompt, gram, 0.0)
    np.fill_diagonal(kernel, 0.0)
    rng = np.random.default_rng(seed)
    signs = np.where(second, 1.0, -1.0)
    _, number = np.unique(prompts, return_inverse=True)
    observed = float(signs @ kernel @ signs)
    members = [np.flatnonzero(number == each) for each in range(int(number.max(initial=-1)) + 1)]
    permuted = np.tile(signs, (resamples, 1))
    for those in members:
        permuted[:, those] = rng.permuted(permuted[:, those], axis=1)
    null = ((permuted @ kernel) * permuted).sum(1)
    reached = int((null >= observed - 1e-9 * abs(observed)).sum())
    return MMD(statistic=observed, p_value=(1 + reached) / (resamples + 1), num_texts=len(signs))


def hamming_gram(texts: Sequence[Sequence[int]]) -> Float[np.ndarray, "n n"]:
    """k(x, y): at how many places two texts have the same id [Gao2025]."""
    longest = max(map(len, texts), default=0)
    padded = np.full((len(texts), longest), -1)
    for row, ids in enumerate(texts):
        padded[row, : len(ids)] = ids
    gram = np.zeros((len(texts), len(texts)))
    for column in padded.T:
        gram += (column[:, None] == column[None, :]) & (column >= 0)
    return gram


def bigram_gram(texts: Sequence[Sequence[int]]) -> Float[np.ndarray, "n n"]:
    """k(x, y): the scalar product of the shares of all ids and pairs of neighbours."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = []
    for ids in texts:
        grams = [(token,) for token in ids] + list(itertools.pairwise(ids))
        rows.append([numbers.setdefault(gram, len(numbers)) for gram in grams])
    features = np.zeros((len(texts), max(1, len(numbers))), dtype=np.float32)
    for row, those in enumerate(rows):
        np.add.at(features[row], those, 1 / max(1, len(those)))
    gram: Float[np.ndarray, "n n"] = (features @ features.T).astype(np.float64)
    return gram
