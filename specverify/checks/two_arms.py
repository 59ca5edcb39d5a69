"""two-arms: speculation on and off, by texts of the same prompts, whatever the engine says of itself.

Note [Two arms]: the other sampled checks hold an engine against a law that we compute, so a kernel that rounds otherwise than
ours counts against it. Here it is held against itself: texts ON and texts OFF after the same prompts with different seeds may
be swapped if speculation changes nothing (Note [Exchangeable arms] in `statistics.two_sample`), so the sign of any score's
difference is a fair coin. One reference scores all texts, and need not be right: what it is wrong about, it is wrong about in
both arms. Two controls say whether the answer is worth anything: OFF against OFF again must show nothing, or the engine or the
harness is in doubt; and a deliberately lossy arm, ON at 0.7 of the temperature, must show, or this comparison is blind.
"""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, Unscored, asked, reproduce, sampling
from specverify.checks.counters import nothing_drafted
from specverify.checks.evidence import EXTENSION, proof, settled, suspicious, told_suspicion
from specverify.engines import Capability
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, StatisticalTest, Verdict
from specverify.scoring import ScoredTraces, score
from specverify.stages import STAGE_FAULTS
from specverify.statistics.budget import MOST_E_PROCESSES
from specverify.statistics.sequential import mix
from specverify.statistics.two_sample import sign_bets, smallest_detectable_signs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.statistics.sequential import EProcess
    from specverify.subject import Subject

__all__ = [
    "ARMS",
    "COLDER",
    "arms_measurements",
    "arms_tests",
    "arms_verdict",
    "compare_arms",
    "controls",
    "pairs_of",
    "text_scores",
    "two_arms",
]

ARMS = ("on", "off", "off-again")
_LOSSY = "lossy"
COLDER = 0.7
"""What the temperature of the lossy arm is multiplied by."""
_BET_SHARE = 0.3
"""A text's score for a fault is Σ log(1 + 0.3 (r/p - 1)): what a bet on the fault would have won with it."""
_EFFECT = "mean difference of a score, in its own root mean square"
_DOUBT = 3.0
"""log10 of the e-value from which the OFF arms are called different."""
_CONTROL = 3.0
"""log10 of the e-value from which the lossy arm is called seen."""


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    """A few texts of every prompt in each arm, until the arms hold the plan's tokens; then more of ON and OFF, until decided."""
    if Capability.SPECULATION_SWITCH not in subject.engine.capabilities:
        return
    params = sampling(subject, plan)
    samples = max(1, -(-plan.two_arms_tokens // (plan.max_new_tokens * max(1, len(subject.prompts)))))
    ask = partial(asked, plan=plan, prompts=subject.prompts, num_samples=samples)
    for arm in ARMS:
        yield ask(f"two-arms/{arm}/0", params=params, speculation=arm == "on")
    yield Unscored(ask(f"two-arms/{_LOSSY}/0", params=replace(params, temperature=COLDER * params.temperature)))
    for number in range(1, EXTENSION):
        for arm in ("on", "off"):
            yield ask(f"two-arms/{arm}/{number}", params=params, speculation=arm == "on")


def _decided(plan: Plan, scored: ScoredTraces) -> bool:
    """Once all arms have answered, unless what they say is suspicious and no proof yet."""
    if not any(request.id.startswith(f"two-arms/{_LOSSY}/") for request in scored.requests()):
        return False
    on, off = _arm(scored, "on"), _arm(scored, "off")
    return len(on.traces) == len(off.traces) and settled(compare_arms(on, off).log10_e, plan)


def text_scores(scored: ScoredTraces) -> dict[str, NDArray[np.float64]]:
    """What each text scores in every way, one number a text; each is a sum over its tokens.

    Of the text alone: how it was drafted is known in one arm and not in the other.
    """
    owner = scored["trace"].astype(np.int64)

    def summed(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(owner, weights=values, minlength=len(scored.traces)).astype(np.float64)

    with np.errstate(divide="ignore"):
        surprisal = -np.log(np.maximum(scored["prob"], 1e-30)) - scored["entropy"]
    scores = {
        "tokens in a text": summed(np.ones(len(scored))),
        "surprise": summed(surprisal),
        "place in the order of probability": summed(scored["pit_prob"] - 0.5),
        "place in the order of ids": summed(scored["pit_id"] - 0.5),
    }
    if len(scored["preferred"]):
        scores["tokens that the draft prefers"] = summed(scored["preferred"] - scored["preferred_prob"])
        scores["place in the order of draft/target"] = summed(scored["pit_ratio"] - 0.5)
    for name in (each for each in scored.fault_ratios if each not in STAGE_FAULTS):
        ratio = scored.fault_ratios[name]
        bounded = np.minimum(np.nan_to_num(ratio, nan=1e6, posinf=1e6), 1e6)
        scores[name] = summed(np.log1p(_BET_SHARE * (bounded - 1)))
    return scores


def pairs_of(first: Sequence[DecodeTrace], second: Sequence[DecodeTrace]) -> NDArray[np.int64]:
    """Places of texts that answer the same in either arm, [2, pairs]: by round, and the first samples of all prompts first.

    The id of a request is "check/arm/round/prompt". So what is asked later comes later, and a path goes on where it ended.
    """

    def asked_for(trace: DecodeTrace) -> tuple[int, int, str]:
        _, _, number, prompt = trace.request.id.split("/", 3)
        return int(number), trace.sample, prompt

    places = {asked_for(trace): at for at, trace in enumerate(second)}
    ours = sorted((asked_for(trace), at) for at, trace in enumerate(first))
    pairs = [(at, places[name]) for name, at in ours if name in places]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def compare_arms(first: ScoredTraces, second: ScoredTraces) -> EProcess:
    """Evidence that texts of two arms don't follow one law: bets on the signs of every score's differences, mixed.

    Texts are paired by prompt and sample; a pair of which one text is missing says nothing.
    """
    ours, theirs = pairs_of(first.traces, second.traces)
    left, right = text_scores(first), text_scores(second)
    return mix({name: sign_bets(left[name][ours] - right[name][theirs]) for name in left if name in right})


def _arm(scored: ScoredTraces, arm: str) -> ScoredTraces:
    """The texts of one arm, numbered anew."""
    of_arm = [at for at, request in enumerate(scored.requests()) if request.id.startswith(f"two-arms/{arm}/")]
    numbers = np.full(len(scored.traces) + 1, -1)
    numbers[of_arm] = np.arange(len(of_arm))
    there = scored.where(numbers[scored["trace"].astype(np.int64)] >= 0)
    renumbered = numbers[there["trace"].astype(np.int64)].astype(np.float64)
    return ScoredTraces(
        tuple(scored.traces[index] for index in of_arm),
        ChainMap({"trace": renumbered}, there.columns),  # type: ignore[arg-type]  # only read
        there.fault_ratios,
    )


def _lossy_arm(subject: Subject, plan: Plan, scored: ScoredTraces) -> ScoredTraces:
    """Its texts, scored as if they had been asked for like the others."""
    params = sampling(subject, plan)
    traces = [
        replace(trace, request=replace(trace.request, params=params))
        for trace in scored.traces
        if trace.request.id.startswith(f"two-arms/{_LOSSY}/")
    ]
    return score(traces, target=subject.target, draft=subject.draft, workers=subject.workers)


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    result = CheckResult(
        id="two-arms",
        claim=two_arms.claim,
        verdict=Verdict.NOT_RUN,
        summary=f"{subject.engine.name} can't be asked to decode without speculation, so there is no second arm",
        reproduce=reproduce(subject, plan, "two-arms"),
    )
    if Capability.SPECULATION_SWITCH not in subject.engine.capabilities:
        return result
    on, off, again = (_arm(scored, arm) for arm in ARMS)
    if not min(len(on), len(off), len(again)):
        return replace(result, verdict=Verdict.INCONCLUSIVE, summary="an arm answered without a token")
    compared = compare_arms(on, off)
    control = compare_arms(off, again)
    lossy = compare_arms(_lossy_arm(subject, plan, scored), off)
    verdict, summary = arms_verdict(plan, on.traces, compared, control, lossy)
    detectable = smallest_detectable_signs(
        len(compared.path),
        false_fail_rate=plan.false_fail_rate / 2 / MOST_E_PROCESSES / len(compared.components),
        false_pass_rate=plan.false_pass_rate,
    )
    return replace(
        result,
        verdict=verdict,
        summary=summary,
        findings=controls(control, lossy),
        tests=arms_tests(compared, control, of="score differences", detectable=detectable, unit=_EFFECT),
        measurements={
            **arms_measurements(compared, control, lossy),
            "mean_tokens_on": len(on) / len(on.traces),
            "mean_tokens_off": len(off) / len(off.traces),
        },
        num_samples=len(compared.path),
        sample_unit="pairs of texts",
        smallest_detectable=detectable,
        effect_unit=_EFFECT,
        advice=_ADVICE,
        plots=(_plot(compared, control, lossy, plan),),
    )


def arms_verdict(
    plan: Plan,
    on: Sequence[DecodeTrace],
    compared: EProcess,
    control: EProcess,
    lossy: EProcess,
    *,
    budget: str = "two_arms_tokens",
) -> tuple[Verdict, str]:
    """The controls first: without them the comparison says nothing. `budget` is the plan's field to raise."""
    if control.log10_max >= _DOUBT:
        said = f"target-only texts differ from target-only texts, 10^{control.log10_max:.1f} to 1 ({control.likeliest})"
        return Verdict.INCONCLUSIVE, f"{said}: the engine, or its seeds, or the harness is in doubt"
    if nothing_drafted(on):
        return Verdict.INCONCLUSIVE, "nothing was drafted in the ON arm, so nothing was compared"
    if suspicious(compared.log10_e):
        seen = f"{len(compared.path)} pairs of texts"
        said = f"evidence 10^{compared.log10_e:.1f} to 1 that the arms differ, after {seen}"
        return Verdict.INCONCLUSIVE, told_suspicion(said, compared.log10_e, plan, proven=seen)
    if lossy.log10_max < _CONTROL:
        said = f"{len(compared.path)} pairs of texts are too few: an arm at {COLDER} of the temperature was not seen"
        return Verdict.INCONCLUSIVE, f"{said} (10^{lossy.log10_max:.1f}); raise {budget} in the plan"
    return Verdict.PASS, (
        f"{len(compared.path)} pairs of texts: ON against OFF 10^{compared.log10_e:.1f} to 1, OFF against OFF "
        f"10^{control.log10_max:.1f}; an arm at {COLDER} of the temperature shows at 10^{lossy.log10_max:.1f}"
    )


def arms_tests(
    compared: EProcess, control: EProcess, *, of: str, detectable: float, unit: str
) -> tuple[StatisticalTest, ...]:
    """The one test of ON against OFF, which says by what they differ; none where OFF against OFF is in doubt already."""
    if control.log10_max >= _DOUBT:
        return ()
    suspected = f", by {compared.likeliest}" if suspicious(compared.log10_e) else ""
    return (
        StatisticalTest(
            name=f"ON against OFF, bets on the signs of {of}{suspected}",
            statistic=compared.log10_e,
            log10_e=compared.log10_e,
            allowed=math.nan,
            failed=False,
            num_samples=len(compared.path),
            smallest_detectable=detectable,
            effect_unit=unit,
        ),
    )


def arms_measurements(compared: EProcess, control: EProcess, lossy: EProcess) -> dict[str, float | int | str]:
    """How each comparison ended."""
    return {
        "num_pairs": len(compared.path),
        "log10_e_on_against_off": compared.log10_e,
        "log10_e_off_against_off": control.log10_max,
        "log10_e_lossy_against_off": lossy.log10_max,
    }


def controls(control: EProcess, lossy: EProcess) -> tuple[Finding, ...]:
    """What the controls showed, worth knowing whatever the answer is."""
    return (
        Finding(text=f"OFF against OFF again: 10^{control.log10_max:.1f} to 1 at most", severity=Verdict.PASS),
        Finding(
            text=f"a deliberately lossy arm against OFF: 10^{lossy.log10_max:.1f} to 1, by {lossy.likeliest}",
            severity=Verdict.PASS,
        ),
    )


def _plot(compared: EProcess, control: EProcess, lossy: EProcess, plan: Plan) -> Plot:
    limit = proof(plan)
    pairs = tuple(range(1, len(compared.path) + 1))
    return Plot(
        id="two-arms/e_process",
        title="Evidence that two arms differ",
        x_label="pairs of texts",
        y_label="log10 of the e-value",
        kind=PlotKind.LINE,
        series=(
            Series(label="ON against OFF", x=pairs, y=tuple(compared.path.tolist())),
            Series(label="OFF against OFF again", x=pairs[: len(control.path)], y=tuple(control.path.tolist())),
            Series(label="a lossy arm against OFF", x=pairs[: len(lossy.path)], y=tuple(lossy.path.tolist())),
            Series(label="fails from here at the latest", x=(0.0, float(len(pairs))), y=(limit, limit), dashed=True),
        ),
        caption="The lossy arm must rise, the two OFF arms must not; ON against OFF is the question.",
    )


_ADVICE = (
    "where the texts ON differ from those OFF, the score by which they do says where to look; where the OFF arms differ, find out "
    "whether seeds are honoured and requests are independent before anything else"
)

two_arms = Check(
    id="two-arms",
    claim="texts with and without speculation follow one law, by the engine's own OFF arm",
    rounds=_rounds,
    decided=_decided,
    wanted_tokens=lambda plan: len(ARMS) * plan.two_arms_tokens,
    conclude=_conclude,
)
"""Sign bets on score differences, with an A/A control and a lossy one; no arm's law need be known exactly."""
