"""Numerics and behaviour, compared: what comes out, each a consequence of what went in, or a cause by itself.

Note [Allowed noise]: two runs that are both right differ by rounding. What is allowed is twice the largest difference of a
logit that either run measured between legitimate execution shapes, or the dtype's entry of `ALLOWED`, whichever is
larger: other kernels round otherwise than any shape on one machine.
Independent noise of sd σ on the logits moves a law by a TV of at most 0.57 σ Σ p (1 - p) in the mean, to first order; the
margin of two logits has sd s = √2 σ. So a decision falls otherwise with probability about 0.4 s Σ p (1 - p), and a text parts
where the first one does. On the same machine with the same releases, and laws equal to the last bit, none may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.golden.records import Change, Layer, LayerVerdict
from specverify.records import Finding, Verdict
from specverify.statistics.interval import cluster_interval

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

    from specverify.golden.records import Recording
    from specverify.statistics.interval import Interval

__all__ = [
    "ALLOWED",
    "FALSE_ALARM_RATE",
    "NoiseBetween",
    "behaviour_verdict",
    "dtype_of",
    "noise_between",
    "numerics_verdict",
    "tv_distance",
]

ALLOWED = {"float64": 1e-8, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference of a log-probability between two releases or machines, by dtype; see docs/golden.md."""

FALSE_ALARM_RATE = 1e-6
"""How often an unchanged pair is blamed by chance, for each of decoder and behaviour."""

_NEGLIGIBLE_TV = 0.01
"""A change of the law below which, without other evidence, it is said not to matter."""


@dataclass(frozen=True)
class NoiseBetween:
    """What is allowed between the two recordings."""

    largest: float
    share: float
    """Mean total variation between the laws of both, rounding included: how often one decision falls otherwise."""


def noise_between(old: Recording, new: Recording) -> NoiseBetween:
    """See Note [Allowed noise]."""
    measured = [each.golden.noise for each in (old, new)]
    table = max(ALLOWED[dtype_of(each)] for each in (old, new))
    largest = max(table, 2 * max(each.largest for each in measured))
    distance = _mean(tv_distance(old, new))
    if distance == 0 and _same_machine(old, new):
        return NoiseBetween(largest=largest, share=0.0)
    probs = np.exp(old.arrays["laws.logprobs"].astype(np.float64))
    undecided = float(((probs * (1 - probs)).sum(1) + np.clip(1 - probs.sum(1), 0, 1)).mean())
    rounding = 0.4 * max(each.margin_sd for each in measured) * undecided
    return NoiseBetween(largest=largest, share=(0.0 if math.isnan(distance) else distance) + rounding)


def _same_machine(old: Recording, new: Recording) -> bool:
    """Whether even the last bits must be the same."""
    one, other = (each.golden.provenances[-1].environment for each in (old, new))
    names = ("torch", "transformers", "device", "cpu")
    return one.device == "cpu" and all(getattr(one, name) == getattr(other, name) for name in names)


def dtype_of(recording: Recording) -> str:
    """In which a recording was made."""
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
    dtypes = dtype_of(old), dtype_of(new)
    if dtypes[0] != dtypes[1]:
        summary = f"recorded in {dtypes[0]}, checked in {dtypes[1]}: log-probabilities of two dtypes are not compared"
        return LayerVerdict(
            layer=Layer.NUMERICS, change=Change.NOT_COMPARED, verdict=Verdict.NOT_RUN, summary=summary,
            measurements={"mean_tv": _mean(tv_distance(old, new))},
        )  # fmt: skip
    difference = np.abs(old.arrays["laws.logprobs"].astype(np.float64) - new.arrays["laws.logprobs"])
    known = np.isfinite(difference)
    noise = noise_between(old, new)
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
    otherwise = old.golden.generation.params != new.golden.generation.params
    law = "law before sampling parameters, which changed," if otherwise else "law"
    text = f"TV of the {law} {distance.estimate:.2g} [{max(distance.low, 0):.2g}, {distance.high:.2g}], {seen.num_tokens:,} recorded tokens: {evidence}"
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
    if explained and (otherwise or distance.high > _NEGLIGIBLE_TV):
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
