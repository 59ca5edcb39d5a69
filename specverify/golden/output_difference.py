"""Numerics, decoder and behaviour, compared: what comes out, each a consequence of what went in, or a cause by itself.

Note [Allowed noise]: two runs that are both right differ by rounding. What is allowed is twice the largest difference of a
logit that either run measured between legitimate execution shapes, or the dtype's entry of `ALLOWED`, whichever is
larger: other kernels round otherwise than any shape on one machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from specverify.golden.records import Change, DecodedSample, Layer, LayerVerdict
from specverify.records import Finding, Verdict
from specverify.statistics.interval import cluster_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from numpy import ndarray

    from specverify.golden.records import PromptGolden, Recording
    from specverify.statistics.interval import Interval

__all__ = ["ALLOWED", "FALSE_ALARM_RATE", "behaviour_verdict", "decoder_verdict", "numerics_verdict", "tv_distance"]

ALLOWED = {"float64": 1e-8, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference of a log-probability between two releases or machines, by dtype; see docs/golden.md."""

FALSE_ALARM_RATE = 1e-6
"""How often an unchanged pair is blamed by chance, for each of decoder and behaviour."""

_NEGLIGIBLE_TV = 0.01
"""A change of the law below which, without other evidence, it is said not to matter."""


@dataclass(frozen=True)
class _Noise:
    """What is allowed between the two recordings."""

    largest: float
    share: float
    """Mean total variation between the laws of both, rounding included: how often one decision falls otherwise."""


def _noise(old: Recording, new: Recording) -> _Noise:
    measured = [each.golden.noise for each in (old, new)]
    table = max(ALLOWED[_dtype(each)] for each in (old, new))
    largest = max(table, 2 * max(each.largest for each in measured))
    rounding = max(each.margin_sd for each in measured)
    distance = _mean(tv_distance(old, new))
    return _Noise(largest=largest, share=(0.0 if math.isnan(distance) else distance) + rounding)


def _dtype(recording: Recording) -> str:
    return recording.golden.provenances[-1].environment.dtype


def tv_distance(old: Recording, new: Recording) -> Float[ndarray, " positions"]:
    """Total variation at each position over the recorded ids, all others as one: a lower bound, close where they are few."""
    one, other = (np.exp(each.arrays["laws.logprobs"].astype(np.float64)) for each in (old, new))
    rest = np.abs(one.sum(1) - other.sum(1))
    distance: Float[ndarray, " positions"] = (np.abs(one - other).sum(1) + rest) / 2
    return distance


def _prompt_numbers(recording: Recording) -> Float[ndarray, " positions"]:
    return np.repeat(
        np.arange(len(recording.golden.prompts)), [len(prompt.positions) for prompt in recording.golden.prompts]
    )


def _place(old: Recording, row: int) -> str:
    numbers = _prompt_numbers(old)
    prompt = old.golden.prompts[int(numbers[row])]
    return f"{prompt.prompt.id}, token {prompt.positions[row - int(np.searchsorted(numbers, numbers[row]))]}"


# ------------------------------------------------------------------------------------------------ numerics


def numerics_verdict(old: Recording, new: Recording, *, explained: str) -> LayerVerdict:
    """Teacher-forced log-probabilities over the same ids. `explained` names a change above that must show here."""
    dtypes = _dtype(old), _dtype(new)
    if dtypes[0] != dtypes[1]:
        summary = f"recorded in {dtypes[0]}, checked in {dtypes[1]}: log-probabilities of two dtypes are not compared"
        return LayerVerdict(
            layer=Layer.NUMERICS, change=Change.NOT_COMPARED, verdict=Verdict.NOT_RUN, summary=summary,
            measurements={"mean_tv": _mean(tv_distance(old, new))},
        )  # fmt: skip
    difference = np.abs(old.arrays["laws.logprobs"].astype(np.float64) - new.arrays["laws.logprobs"])
    known = np.isfinite(difference)
    noise = _noise(old, new)
    largest = float(difference[known].max(initial=0.0))
    flips = np.flatnonzero(old.arrays["laws.best"] != new.arrays["laws.best"])
    wide = [int(row) for row in flips if old.arrays["laws.margin"][row] > 2 * noise.largest]
    beyond = largest > noise.largest or bool(wide) or not known.all()
    measured = {
        "largest_difference_nats": largest,
        "allowed_difference_nats": noise.largest,
        "positions": len(difference),
        "argmax_flips": len(flips),
        "argmax_flips_beyond_noise": len(wide),
        "mean_tv": _mean(tv_distance(old, new)),
    }
    text = f"log-probabilities at {len(difference)} positions differ by at most {largest:.2g} (allowed {noise.largest:.2g})"
    if not beyond:
        more = f"; {len(flips)} argmax flips, each where the margin is below the noise" if flips.size else ""
        return LayerVerdict(
            layer=Layer.NUMERICS, change=Change.UNCHANGED, verdict=Verdict.PASS, summary=text + more,
            measurements=measured,
        )  # fmt: skip
    findings = (
        [] if known.all() else [Finding(text=f"{int((~known).any(1).sum())} positions hold ids that can't be read now")]
    )
    if known.any():
        row = int(np.argmax(np.where(known, difference, -1).max(1)))
        findings.append(
            Finding(text=f"largest difference {difference[row][known[row]].max():.3g}", place=_place(old, row))
        )
    for row in wide[:3]:
        ids = old.arrays["laws.best"][row], new.arrays["laws.best"][row]
        margin = old.arrays["laws.margin"][row]
        text_of = f"the most probable id was {ids[0]} by a margin of {margin:.3g}, is {ids[1]}; noise explains {2 * noise.largest:.2g}"
        findings.append(Finding(text=text_of, place=_place(old, row)))
    if explained:
        return LayerVerdict(
            layer=Layer.NUMERICS, change=Change.CONSEQUENCE, verdict=Verdict.FAIL,
            summary=f"{text}, as {explained} explains", findings=tuple(findings), measurements=measured,
        )  # fmt: skip
    return LayerVerdict(
        layer=Layer.NUMERICS,
        change=Change.CAUSE,
        verdict=Verdict.FAIL,
        summary=f"{text}, and weights and configuration are the same",
        parts=("log-probabilities",),
        findings=tuple(findings),
        measurements=measured,
        advice="the same weights compute something else: compare the releases of torch and transformers, the attention "
        "implementation and the kernels in the provenance; try the recorded releases first",
    )


def _mean(values: Float[ndarray, " n"]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


# ------------------------------------------------------------------------------------------------ decoder


def decoder_verdict(old: Recording, new: Recording, *, explained: str) -> LayerVerdict:
    """The same prompts, parameters and seeds through the decoder: ids, steps and accepted drafts."""
    if _dtype(old) != _dtype(new):
        summary = f"recorded in {_dtype(old)}, checked in {_dtype(new)}: texts of two dtypes part early, so they are not compared"
        return LayerVerdict(layer=Layer.DECODER, change=Change.NOT_COMPARED, verdict=Verdict.NOT_RUN, summary=summary)
    noise = _noise(old, new)
    texts = list(_texts(old, new))
    parted = [each for each in texts if each.differs]
    wide = [each for each in parted if each.greedy and each.margin > 2 * noise.largest]
    decisions = sum(len(each.old.token_ids) + sum(each.old.drafted) for each in texts)
    allowed = int(stats.poisson.isf(FALSE_ALARM_RATE, max(decisions * noise.share, 1e-12)))
    measured = {
        "texts": len(texts),
        "texts_that_part": len(parted),
        "allowed_to_part": allowed,
        "acceptance_rate_then": old.golden.acceptance_rate,
        "acceptance_rate_now": new.golden.acceptance_rate,
    }
    text = f"{len(parted)} of {len(texts)} texts have other ids or steps"
    if not parted or not (explained or wide or len(parted) > allowed):
        more = f"; rounding explains up to {allowed}" if parted else ""
        return LayerVerdict(
            layer=Layer.DECODER, change=Change.UNCHANGED, verdict=Verdict.PASS, summary=text + more,
            measurements=measured,
        )  # fmt: skip
    findings = tuple(Finding(text=each.told(), place=each.place) for each in (*wide, *parted)[:4])
    if explained:
        return LayerVerdict(
            layer=Layer.DECODER, change=Change.CONSEQUENCE, verdict=Verdict.FAIL,
            summary=f"{text}, as {explained} explains", findings=findings, measurements=measured,
        )  # fmt: skip
    kinds = tuple(dict.fromkeys(each.kind() for each in parted))
    return LayerVerdict(
        layer=Layer.DECODER,
        change=Change.CAUSE,
        verdict=Verdict.FAIL,
        summary=f"{text}, though models, numbers and parameters are the same; rounding explains {allowed}",
        parts=kinds,
        findings=findings,
        measurements=measured,
        advice="drafting, acceptance, random streams or rollback work otherwise: run specverify certify --only exactness,lossless,greedy",
    )


@dataclass(frozen=True, kw_only=True)
class _Text:
    """One text of both recordings."""

    place: str
    old: DecodedSample
    new: DecodedSample
    greedy: bool
    margin: float
    """Of the recorded law where the greedy texts part; NaN where they don't."""

    @property
    def differs(self) -> bool:
        return self.old != self.new

    def kind(self) -> str:
        """What differs first."""
        if self.old.token_ids != self.new.token_ids:
            return "greedy ids" if self.greedy else "sampled ids"
        return "drafted tokens" if self.old.drafted != self.new.drafted else "accepted tokens"

    def told(self) -> str:
        """Where it begins to differ."""
        pairs = [(self.old.token_ids, self.new.token_ids, "token"), (self.old.accepted, self.new.accepted, "step"),
                 (self.old.drafted, self.new.drafted, "step")]  # fmt: skip
        one, other, unit = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        place = _first(one, other)
        seen = [str(side[place]) if place < len(side) else "nothing" for side in (one, other)]
        what = {"token": "id", "step": "accepted"}[unit] if one is not self.old.drafted else "drafted"
        return f"{unit} {place} is the first that differs ({what} {seen[0]} became {seen[1]})"


def _first(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _texts(old: Recording, new: Recording) -> Iterator[_Text]:
    row = 0
    for then, now in zip(old.golden.prompts, new.golden.prompts, strict=True):
        margins = old.arrays["laws.margin"][row : row + len(then.positions)]
        row += len(then.positions)
        if not now.decoded.target_only:  # it could not be read any more
            continue
        name = then.prompt.id
        yield _greedy(f"{name}, without speculation", then, _bare(then.decoded.target_only),
                      _bare(now.decoded.target_only), margins)  # fmt: skip
        yield _greedy(f"{name}, speculative", then, then.decoded.greedy, now.decoded.greedy, margins)
        for number, (one, other) in enumerate(zip(then.decoded.sampled, now.decoded.sampled, strict=False)):
            yield _Text(place=f"{name}, sample {number}", old=one, new=other, greedy=False, margin=math.nan)


def _bare(ids: tuple[int, ...]) -> DecodedSample:
    return DecodedSample(token_ids=ids, drafted=(), accepted=())


def _greedy(
    place: str, prompt: PromptGolden, old: DecodedSample, new: DecodedSample, margins: Float[ndarray, " positions"]
) -> _Text:
    """With the margin at the first token that differs, where the recorded law is that of the recorded greedy text."""
    at = len(prompt.encoding.ids) + _first(old.token_ids, new.token_ids)
    known = old.token_ids != new.token_ids and at in prompt.positions
    margin = float(margins[prompt.positions.index(at)]) if known else math.nan
    return _Text(place=place, old=old, new=new, greedy=True, margin=margin)


# ------------------------------------------------------------------------------------------------ behaviour


def behaviour_verdict(old: Recording, new: Recording, *, explained: str, prompts_otherwise: int) -> LayerVerdict:
    """Whether it matters: recorded outputs under the present target and parameters."""
    seen = new.behaviour
    distance = _distance(old, new)
    measured: dict[str, float | int | str] = {"tv": distance.estimate, "tv_low": distance.low, "tv_high": distance.high}
    if seen is None:
        return LayerVerdict(
            layer=Layer.BEHAVIOUR,
            change=Change.NOT_COMPARED,
            verdict=Verdict.NOT_RUN,
            summary="no outputs were recorded",
        )
    measured |= {"log10_e": seen.log10_e, "tokens": seen.num_tokens, "impossible_tokens": seen.num_impossible}
    evidence = f"e = 10^{seen.log10_e:.1f}" if math.isfinite(seen.log10_e) else "proof"
    text = f"TV of the law {distance.estimate:.2g} [{max(distance.low, 0):.2g}, {distance.high:.2g}], {seen.num_tokens:,} recorded tokens: {evidence}"
    if prompts_otherwise:
        measured["prompts_encoded_otherwise"] = prompts_otherwise
        text = f"{prompts_otherwise} of {len(old.golden.prompts)} prompts reach the model as other ids; over the old ids: {text}"
    if seen.num_impossible:
        text += f"; {seen.num_impossible} of them are impossible now"
    certain = seen.log10_e >= -math.log10(FALSE_ALARM_RATE)
    if certain or prompts_otherwise:
        change = Change.CONSEQUENCE if explained else Change.CAUSE
        return LayerVerdict(
            layer=Layer.BEHAVIOUR, change=change, verdict=Verdict.FAIL, summary=text,
            parts=("law of the outputs",) if change is Change.CAUSE else (), measurements=measured,
            advice="" if explained else "the pair says something else than it said, and nothing above explains it: record "
            "on the same device and dtype, then compare again",
        )  # fmt: skip
    if explained and distance.high > _NEGLIGIBLE_TV:
        summary = f"{text}: a difference that so few tokens can't prove"
        return LayerVerdict(
            layer=Layer.BEHAVIOUR, change=Change.CONSEQUENCE, verdict=Verdict.INCONCLUSIVE, summary=summary,
            measurements=measured,
        )  # fmt: skip
    return LayerVerdict(
        layer=Layer.BEHAVIOUR, change=Change.UNCHANGED, verdict=Verdict.PASS, summary=text, measurements=measured
    )


def _distance(old: Recording, new: Recording) -> Interval:
    distance = tv_distance(old, new)
    known = np.isfinite(distance)
    return cluster_interval(distance[known], _prompt_numbers(old)[known])
