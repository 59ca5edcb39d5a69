"""A whole engine held against the laws that it tells itself without speculation, where its target can't be loaded here.

Note [Told laws] says what that shows. Each claim is held of the texts without speculation first: where those don't follow the
laws that the engine tells of them, its log-probabilities (or their reading) are in doubt, and nothing follows about speculation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from specverify.checks.check import asked, spread
from specverify.checks.evidence import (
    EXTENSION,
    detectable_shift,
    e_process,
    e_process_test,
    empty_texts,
    in_doubt,
    pit_tests,
    proof,
    suspicious,
    tokens_needed,
)
from specverify.checks.lossless import lossless_rounds
from specverify.checks.noise import MOST_OF_ENGINE
from specverify.conformance.asking import Asking, Seen, cell, if_drafted
from specverify.conformance.cells import certificate_of, held
from specverify.conformance.laws import on_subject, require_off
from specverify.conformance.told import drafting, vocabulary
from specverify.engines import Capability
from specverify.engines.arms import Guarded, TargetOnly
from specverify.errors import PlanError
from specverify.judge import judge
from specverify.records import CheckResult, Finding, SamplingParams, Verdict
from specverify.scoring import ScoredTraces
from specverify.statistics.budget import MOST_E_PROCESSES, most_p_values
from specverify.told_law import score_by_told_laws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.checks.check import Check
    from specverify.conformance.laws import Laws
    from specverify.engines import Engine, Rescoring
    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.records import Certificate, DecodeTrace
    from specverify.watch import Watch

__all__ = ["CELLS_WITHOUT_TARGET", "TOP", "certify_by_engine"]

CELLS_WITHOUT_TARGET = ("drafting", "vocabulary", "greedy", "lossless")

TOP = 20
"""Likeliest ids whose probabilities are asked for: as many as vLLM tells without `--max-logprobs`."""
_LEAST_NOISE = 1e-6
"""Logits: told log-probabilities are rounded to float32 at best."""
_CLAIM_OF_LAW = "emitted tokens follow the law that the engine tells of itself without speculation"
_CLAIM_OF_GREEDY = "at temperature 0, every token is the first choice that the engine tells without speculation"


@dataclass(frozen=True)
class _Scorer:
    """The engine without speculation, asked about texts."""

    off: Engine
    draft: LanguageModel | None
    top: int

    def __call__(self, traces: Sequence[DecodeTrace]) -> ScoredTraces:
        rescoring = cast("Rescoring", self.off)
        told = list(rescoring.prompt_logprobs(traces, top=self.top))
        return score_by_told_laws(traces, told, top=self.top, draft=self.draft)

    def noise(self, traces: Sequence[DecodeTrace]) -> float:
        """How far what it reports while it decodes lies from what it tells of the same text afterwards."""
        rescoring, seen = cast("Rescoring", self.off), [_LEAST_NOISE]
        for trace, laws in zip(traces, rescoring.prompt_logprobs(traces, top=1), strict=True):
            if len(trace.logprobs) == len(trace.token_ids) > 0:
                again = np.array([law[token] for law, token in zip(laws, trace.token_ids, strict=True)])
                moved = np.abs(np.array(trace.logprobs) - again)
                seen.append(float(moved[np.isfinite(moved)].max(initial=0.0)))  # what is no number allows for nothing
        return min(max(seen), MOST_OF_ENGINE)


# ------------------------------------------------------------------------------------------------------------- greedy


def _look_at_greedy(scorer: _Scorer, asking: Asking) -> Seen:
    plan, subject = asking.plan, asking.subject
    params = SamplingParams(temperature=0, max_new_tokens=plan.max_new_tokens, eos_token_ids=subject.eos_token_ids)
    prompts = spread(subject.prompts, plan.greedy_prompts)
    on = asking.answers(asked("greedy/on", plan, prompts, params))
    alone = asking.answers(asked("greedy/off", plan, prompts, params, speculation=False))
    scored, control = scorer(on), scorer(alone)
    seen = max(scorer.noise(alone), float(control["gap"].max()) / 2 if len(control) else 0.0)
    allowed = 2 * min(seen, MOST_OF_ENGINE)
    wrong = [
        Finding(
            text=f"token {int(scored['position'][at])} is {int(scored['token'][at])}, which is {scored['gap'][at]:.3g} logits "
            f"below the first choice that the engine tells (allowed {allowed:.2g})",
            place=f"{on[int(scored['trace'][at])].request.id}, prompt {list(on[int(scored['trace'][at])].request.prompt_ids)[:40]}",
        )
        for at in np.flatnonzero(scored["gap"] > allowed)[:10]
    ]
    differing = sum(one.token_ids != other.token_ids for one, other in zip(on, alone, strict=True))
    found = Seen(
        summary=f"{len(scored):,} tokens, {int((scored['gap'] > 0).sum())} not the first choice told, none further below it than "
        f"the engine's own noise ({allowed:.2g} logits); {differing} of {len(on)} texts differ from those without speculation",
        wrong=(*empty_texts(scored), *wrong),
        num_samples=len(scored),
        smallest_detectable=allowed,
        effect_unit="logits",
        advice="compare what the engine verifies at temperature 0 with its own first choices",
        verdict=Verdict.PASS if len(scored) else Verdict.INCONCLUSIVE,
    )
    return if_drafted(found, on)


# ---------------------------------------------------------------------------------------------------------------- law


def _look_at_law(scorer: _Scorer, asking: Asking) -> Seen:
    plan = asking.plan
    scored = ScoredTraces()
    for requests in lossless_rounds(asking.subject, plan, times=EXTENSION):
        scored = scored.merge(scorer(asking.answers(requests)))
        log10_e = e_process(scored).log10_e if len(scored) else 0.0
        if log10_e >= proof(plan) or (len(scored) >= plan.lossless_tokens and not suspicious(log10_e)):
            break
    if not len(scored):
        return Seen(summary="not a token was emitted", verdict=Verdict.INCONCLUSIVE)
    impossible = [
        Finding(text=f"token {int(scored['token'][at])} was emitted, and the engine tells that its probability is 0",
                place=scored.traces[int(scored["trace"][at])].request.id)
        for at in np.flatnonzero(np.isinf(scored["edge"]))[:5]
    ]  # fmt: skip
    scored = scored.where(~np.isinf(scored["edge"]))
    law = e_process_test(scored, plan, name="stream")
    fixed = scored.where(
        np.arange(len(scored)) < plan.lossless_tokens
    )  # what has a p-value isn't chosen by what it says
    tests = (law, *pit_tests(fixed, plan, name="stream"))
    detectable, wanted = detectable_shift(len(fixed), plan), plan.largest_undetected_shift
    enough = detectable <= wanted
    smallest = min((test.p_value for test in tests if test.p_value is not None), default=math.nan)
    found = Seen(
        summary=f"{len(scored):,} tokens of {len(asking.subject.prompts)} prompts: evidence against the told laws "
        f"10^{law.log10_e or 0.0:.1f} to 1, smallest p-value {smallest:.2g}"
        + ("" if enough else f"; too few: a shift of the mean law below {detectable:.2g} would go unseen"),
        wrong=(*empty_texts(scored), *impossible),
        tests=tests,
        num_samples=len(scored),
        smallest_detectable=detectable,
        effect_unit="shift of the mean PIT law",
        advice="compare the law that drafts are drawn from with the one that they are verified with, at the temperature that is asked"
        if enough
        else f"set lossless_tokens = {tokens_needed(wanted, plan)} in the plan",
        verdict=Verdict.PASS if enough else Verdict.INCONCLUSIVE,
        measurements={
            "share_in_the_atom": float(np.mean(scored["in_atom"])),
        },
    )
    return if_drafted(found, scored.traces)


# --------------------------------------------------------------------------------------------------------------- run


def certify_by_engine(
    engine: Engine,
    off: Engine | None,
    laws: Laws,
    plan: Plan,
    *,
    watch: Watch | None = None,
    command: str = "specverify certify",
    top: int = TOP,
) -> Certificate:
    """Hold greedy exactness and the law of an engine against what it tells without speculation; `laws.target` may be absent.

    Raises `PlanError` for an engine that can't be asked without speculation or tells no log-probabilities of a prompt, and for
    sampling parameters under which the law is not known from the likeliest ids alone.
    """
    started = time.perf_counter()
    off = require_off(off, scorer="engine")
    _require_answerable(off, plan)
    scorer = _Scorer(Guarded(off), laws.draft, min(top, laws.target.vocab_size - 1))
    cells = (
        cell("greedy", _CLAIM_OF_GREEDY, partial(_look_at_greedy, scorer)),
        cell("lossless", _CLAIM_OF_LAW, partial(_look_at_law, scorer)),
    )
    # steps can't be held against a target that isn't here, so the draft's law is for the scorer alone
    subject = on_subject(engine, off, replace(laws, draft=None), command=command)
    alone = replace(subject, engine=TargetOnly(Guarded(off)))
    chosen = [each for each in (drafting, vocabulary, *cells) if not plan.only or each.id in plan.only]
    results = [_off(held(each, alone, plan, watch)) for each in cells if each in chosen]
    judged, _ = judge(
        results, plan.false_fail_rate, least_e_processes=MOST_E_PROCESSES,
        least_p_values=most_p_values(plan.first_token_prompts),
    )  # fmt: skip  # of the whole run, as in `hold_cells`
    doubtful = {one.id.removeprefix("off/") for one in judged if one.verdict is Verdict.FAIL}
    results += [_in_doubt(each) if each.id in doubtful else held(each, subject, plan, watch) for each in chosen]
    return certificate_of(results, engine.name, laws, plan, command=command, started=started)


def _require_answerable(off: Engine, plan: Plan) -> None:
    if Capability.PROMPT_LOGPROBS not in off.capabilities:
        msg = f"{off.name} tells no log-probabilities of a prompt, so it can't score; compare its texts with --score-by texts"
        raise PlanError(msg)
    usual = replace(
        plan.params,
        max_new_tokens=SamplingParams().max_new_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        stop_strings=(),
    )
    if usual != SamplingParams():
        msg = "--score-by engine knows the law at temperature 1 without filters or penalties alone; take them from the plan's params"
        raise PlanError(msg)


def _off(result: CheckResult) -> CheckResult:
    tests = tuple(replace(test, name=f"off: {test.name}") for test in result.tests)
    advice = "what the engine tells of its own texts is not what it draws from: look at its log-probabilities first"
    return replace(
        result, id=f"off/{result.id}", claim=f"without speculation: {result.claim}", tests=tests,
        advice=advice if in_doubt(result) else result.advice,
    )  # fmt: skip


def _in_doubt(check: Check) -> CheckResult:
    summary = "not held: without speculation it fails as well, so the engine's own log-probabilities are in doubt"
    return CheckResult(id=check.id, claim=check.claim, verdict=Verdict.NOT_RUN, summary=summary)
