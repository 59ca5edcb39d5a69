"""Evidence that may be looked at any time: e-processes, as paths of log10 e after each observation.

Note [e-process]: a bet multiplies a capital by b_t >= 0 whose expectation given the past is at most 1 if the claim
holds. The product of the bets, and any average of such products, then ever reaches 1/α with probability at most α
[Ville1939]. So one may look after each token, stop at will, and carry on tomorrow. A capital that grows is evidence
against the claim, and the bet that made it grow names the fault. All paths here are log10, so that 200,000 tokens
neither overflow nor vanish.

Note [Naming]: proof that something is wrong comes before proof of what. Two bets divide by the same law, so their quotient is
the likelihood of one fault over that of the other, and under the second it exceeds k with probability at most 1/k, at any
time. A bet mixes three η evenly, so the bet on a fault that always acts is a third of its best at least: another fault is a
hundred times as likely as it with probability 0.03 at most. So a name stands alone only where every other is a hundredth as
likely, else the others are listed; and it is read at the last token that was drawn, not at the one that was proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from specverify.errors import InternalError
from specverify.statistics.design import require_rate
from specverify.statistics.uniformity import bin_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jaxtyping import Bool, Float

__all__ = [
    "BernoulliBets",
    "EProcess",
    "bernoulli_bets",
    "e_value_samples_needed",
    "histogram_bets",
    "likelihood_ratio_bets",
    "mix",
    "smallest_detectable_kl",
]

_LN10 = math.log(10)
_TOLD_APART = 2.0
"""log10 of how much likelier a fault must be than another for its name to stand alone (Note [Naming])."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EProcess:
    """A weighted average of e-processes, itself one."""

    path: Float[np.ndarray, " n"]
    """log10 of the average after each observation."""
    components: Mapping[str, float]
    """log10 of each component, without its weight, at the last observation that is no proof by itself."""
    likeliest: str
    """The component that contributes most there: it names the fault, if there is one."""
    rivals: tuple[str, ...] = ()
    """Those that contribute a hundredth of that or more, the next likeliest first: not told apart yet (Note [Naming])."""

    @property
    def log10_e(self) -> float:
        """At the end; what may be averaged with others, and used by e-BH."""
        return float(self.path[-1]) if len(self.path) else 0.0

    @property
    def log10_max(self) -> float:
        """The largest so far, at least 0: valid against a threshold (Ville), but not to be averaged."""
        return max(0.0, float(self.path.max(initial=0.0)))

    def first_crossing(self, log10_threshold: float) -> int | None:
        """Index of the first observation at which the evidence reaches the threshold."""
        reached = self.path >= log10_threshold
        return int(reached.argmax()) if reached.any() else None


def _capital(bets: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """log10 of the running product. An infinite bet is proof: it stays, even where the capital was 0 before."""
    proof = ~(bets < np.inf)  # NaN is 0/0: the claim gives that observation probability 0, whatever was bet on it
    with np.errstate(divide="ignore"):
        path = np.cumsum(np.log10(np.where(proof, 1.0, bets)))
    path[np.logical_or.accumulate(proof)] = np.inf
    return path


def _average(paths: Iterable[Float[np.ndarray, " n"]], weights: Iterable[float]) -> Float[np.ndarray, " n"]:
    """log10 of the weighted average of the paths, one path at a time."""
    total: Float[np.ndarray, " n"] | None = None
    for path, weight in zip(paths, weights, strict=True):
        term = path * _LN10 + (math.log(weight) if weight else -math.inf)
        total = term if total is None else np.logaddexp(total, term)
    if total is None:
        msg = "an e-process needs at least one bet"
        raise InternalError(msg)
    return total / _LN10


def _read(paths: Mapping[str, Float[np.ndarray, " n"]], lasts: dict[str, float]) -> Iterator[Float[np.ndarray, " n"]]:
    """Each path once, so that a mapping may make them one at a time; `lasts` gets where each ends."""
    lengths: dict[str, int] = {}
    for name in paths:
        path = paths[name]
        lengths[name] = len(path)
        if len(set(lengths.values())) > 1:
            msg = f"the components have different lengths: {lengths}"
            raise InternalError(msg)
        if len(path):
            lasts[name] = float(path[-1])
        yield path


def mix(paths: Mapping[str, Float[np.ndarray, " n"]], weights: Mapping[str, float] | None = None) -> EProcess:
    """One e-process from several over the same observations, by their average; weights are normalised, even by default.

    Valid under any dependence between the components [VovkWang2021]. It costs at most log10(number of components)
    against having known the right bet. Raises `InternalError` for no component, unequal lengths or a negative weight.

    >>> mix({"a": np.array([0.0, 2.0]), "b": np.array([0.0, -9.0])}).likeliest
    'a'
    """
    shares = np.array([1.0 if weights is None else weights[name] for name in paths], dtype=np.float64)
    if not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        msg = f"weights must be at least 0, and not all 0: {weights}"
        raise InternalError(msg)
    shares /= shares.sum()
    lasts: dict[str, float] = {}
    average = _average(_read(paths, lasts), shares.tolist())
    finite = np.flatnonzero(average < np.inf)
    at = finite[-1] if len(finite) else None
    if at is None:
        ends = dict.fromkeys(paths, 0.0)
    else:
        ends = lasts if at == len(average) - 1 else {name: float(paths[name][at]) for name in paths}
    with np.errstate(divide="ignore"):
        contributions = np.array(list(ends.values())) + np.log10(shares)
    first, *others = (list(ends)[at] for at in np.argsort(-contributions, kind="stable"))
    near = int((contributions >= contributions.max() - _TOLD_APART).sum()) - 1
    return EProcess(path=average, components=ends, likeliest=first, rivals=tuple(others[:near]))


def likelihood_ratio_bets(
    ratio: Float[np.ndarray, " n"], etas: tuple[float, ...] = (0.05, 0.3, 1.0)
) -> Float[np.ndarray, " n"]:
    """Bets on a fault whose law is r: the average over η of Π (1 - η + η r_t(x_t)/p_t(x_t)), as log10.

    Under the claim r/p averages to at most 1, so each factor is a fair bet. η = 1 is the likelihood ratio, best if the
    fault acts always; a smaller η bets on a fault that acts now and then. An infinite ratio, or NaN (0/0), is a token
    that the target can't emit: the evidence is infinite from there on. Raises `InternalError` for a negative ratio.
    """
    if (ratio < 0).any() or not all(0 < eta <= 1 for eta in etas):
        msg = "a likelihood ratio must be at least 0, and each η in (0, 1]"
        raise InternalError(msg)
    ratio = np.asarray(ratio, dtype=np.float64)
    return _average((_capital(1 - eta + eta * ratio) for eta in etas), [1 / len(etas)] * len(etas))


def histogram_bets(values: Float[np.ndarray, " n"], bins: int = 16) -> Float[np.ndarray, " n"]:
    """Bets on any unevenness of PIT values: each bin by its share so far, bins·(c + ½) / (t - 1 + bins/2), as log10.

    The Krichevsky–Trofimov bet: it needs no idea of the fault, and pays (bins - 1)/2 · log10 n for it
    [ArnoldHenziZiegel2023]. Raises `InternalError` for a value outside [0, 1].
    """
    numbers = bin_numbers(values, bins)
    met_before = np.empty(len(numbers), dtype=np.int64)
    by_bin = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[by_bin], numbers[by_bin])
    met_before[by_bin] = np.arange(len(numbers)) - starts  # in the same bin
    return _capital(bins * (met_before + 0.5) / (np.arange(len(numbers)) + bins / 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class BernoulliBets:
    """Two paths of log10 e: flags come more often, or less often, than they were said to."""

    above: Float[np.ndarray, " n"]
    """Valid against "probability at most prob_t". More acceptance than Σ min(p, q) allows is proof of lossiness."""
    below: Float[np.ndarray, " n"]
    """Valid against "probability at least prob_t". Less is no loss: a draft that lags, or wastes its tokens."""

    def two_sided(self) -> EProcess:
        """Against "probability prob_t"."""
        return mix({"above": self.above, "below": self.below})


def bernoulli_bets(
    flags: Bool[np.ndarray, " n"], probs: Float[np.ndarray, " n"], tilts: tuple[float, ...] = (0.1, 0.3, 1.0)
) -> BernoulliBets:
    """Bets against "flag_t has probability prob_t given the past", on each side.

    A bet is exp(θ flag) / E exp(θ flag), and a side is the average over the tilts of their products. With θ > 0 the bet
    stays fair for every smaller probability, with θ < 0 for every larger one: the sides are one-sided tests. A flag of
    probability 0, or a missing one of probability 1, is proof. Raises `InternalError` outside [0, 1].
    """
    if flags.shape != probs.shape or not ((probs >= 0) & (probs <= 1)).all():
        msg = "flags and probabilities must go in pairs, and a probability must lie in [0, 1]"
        raise InternalError(msg)
    impossible = np.where(flags, probs == 0, False), np.where(flags, False, probs == 1)  # noqa: FBT003 - array values

    def side(sign: int) -> Float[np.ndarray, " n"]:
        proof = impossible[0] if sign > 0 else impossible[1]
        paths = (
            _capital(np.where(proof, np.inf, np.exp(sign * tilt * flags) / (1 + probs * math.expm1(sign * tilt))))
            for tilt in tilts
        )
        return _average(paths, [1 / len(tilts)] * len(tilts))

    return BernoulliBets(above=side(1), below=side(-1))


def _root_nats(false_fail_rate: float, false_pass_rate: float) -> float:
    """The square root of the nats that an e-process must expect: x² - z √2 x = ln(1/α), z the quantile of 1 - β."""
    require_rate(false_fail_rate, false_pass_rate)
    z = float(special.ndtri(1 - false_pass_rate))
    return (z * math.sqrt(2) + math.sqrt(2 * z * z - 4 * math.log(false_fail_rate))) / 2


def e_value_samples_needed(kl_nats: float, false_fail_rate: float, *, false_pass_rate: float = 0.5) -> int:
    """Observations until the right bet, growing by `kl_nats` each, reaches 1/rate: ln(1/rate) / kl in the median.

    For another `false_pass_rate` the log of the capital is taken for a Gaussian walk of drift kl and variance 2 kl,
    which is what a likelihood ratio close to 1 has. A mixture of K bets needs log(K) nats more.
    """
    return max(1, math.ceil(_root_nats(false_fail_rate, false_pass_rate) ** 2 / kl_nats))


def smallest_detectable_kl(num_samples: int, *, false_fail_rate: float, false_pass_rate: float = 0.5) -> float:
    """The growth in nats per observation that an e-process of the right bet reliably sees in so many observations."""
    return _root_nats(false_fail_rate, false_pass_rate) ** 2 / num_samples if num_samples else math.inf
