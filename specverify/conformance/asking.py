"""Cells that ask and look at once: what a cell is made from, and what several of them need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, derived_seed, reproduce
from specverify.checks.counters import nothing_drafted
from specverify.checks.evidence import e_process_test, support, suspicious, told_suspicion
from specverify.checks.noise import MOST_OF_ENGINE, measured_noise
from specverify.errors import SubjectError
from specverify.records import CheckResult, DecodeRequest, Finding, StatisticalTest, Verdict
from specverify.scoring import score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specverify.plan import Plan
    from specverify.records import DecodeTrace, SamplingParams
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["Asking", "Seen", "cell", "wrong_greedy_tokens"]


@dataclass(frozen=True)
class Asking:
    """One cell at work on one subject."""

    subject: Subject
    plan: Plan
    cell_id: str

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        name: str,
        seed: int | None = None,
        num_samples: int = 1,
    ) -> DecodeRequest:
        """A request of this cell; its seed follows from its name unless it is given."""
        return DecodeRequest(
            id=f"{self.cell_id}/{name}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=derived_seed(self.plan.seed, self.cell_id, name) if seed is None else seed,
            num_samples=num_samples,
            prompt_id=name,
        )

    def answers(self, requests: Sequence[DecodeRequest]) -> list[DecodeTrace]:
        """What the engine says; ids that the target doesn't have end the cell with `SubjectError`."""
        traces = list(self.subject.engine.decode(requests))
        for trace in traces:
            for place, token in enumerate(trace.token_ids):
                if not 0 <= token < self.subject.target.vocab_size:
                    msg = (
                        f"id {token} was emitted as token {place} of {trace.request.id}, sample {trace.sample}, but the "
                        f"target has {self.subject.target.vocab_size:,} ids"
                    )
                    raise SubjectError(msg)
        return traces

    def scored(self, traces: Sequence[DecodeTrace]) -> ScoredTraces:
        """Under the target, and against the draft where its law is known."""
        return score(traces, target=self.subject.target, draft=self.subject.draft, workers=self.subject.workers)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a cell saw; PASS unless something is wrong with it."""

    summary: str
    """Where nothing is wrong."""
    wrong: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    tests: tuple[StatisticalTest, ...] = ()
    num_samples: int = 0
    sample_unit: str = "tokens"
    smallest_detectable: float | None = None
    effect_unit: str = ""
    advice: str = ""
    verdict: Verdict = Verdict.PASS
    """Of what was seen, if nothing is wrong."""
    measurements: dict[str, float | int | str] | None = None


def if_drafted(seen: Seen, traces: Iterable[DecodeTrace]) -> Seen:
    """Where the steps of `traces` say that nothing was drafted, nothing was shown of speculation: no PASS then."""
    if seen.verdict is not Verdict.PASS or not nothing_drafted(traces):
        return seen
    return replace(seen, summary="nothing was drafted, so nothing was shown", verdict=Verdict.INCONCLUSIVE)


def cell(cell_id: str, claim: str, look: Callable[[Asking], Seen]) -> Check:
    """A check whose questions depend on the answers: it asks nothing beforehand, and looks in one go."""
    return Check(id=cell_id, claim=claim, conclude=partial(_concluded, cell_id, claim, look))


def _concluded(
    cell_id: str, claim: str, look: Callable[[Asking], Seen], subject: Subject, plan: Plan, scored: ScoredTraces
) -> CheckResult:
    del scored
    seen = look(Asking(subject, plan, cell_id))
    wrong = tuple(each for each in seen.wrong if each.severity is Verdict.FAIL)
    notes = (*(each for each in seen.wrong if each.severity is not Verdict.FAIL), *seen.notes)
    first = f"{wrong[0].place}: {wrong[0].text}" if wrong and wrong[0].place else ""
    summary = first or (wrong[0].text if wrong else seen.summary)
    verdict = Verdict.FAIL if wrong else seen.verdict
    suspect = next((test for test in seen.tests if test.log10_e is not None and suspicious(test.log10_e)), None)
    if suspect is not None and verdict is Verdict.PASS:  # unless the judge finds it to be proof
        said = f"evidence 10^{suspect.log10_e:.1f} to 1, {suspect.name}"
        told = told_suspicion(said, suspect.log10_e or 0.0, plan, proven="")
        verdict, summary = Verdict.INCONCLUSIVE, f"{told}; {summary}" if told else summary
    return CheckResult(
        id=cell_id,
        claim=claim,
        verdict=verdict,
        summary=summary,
        findings=(*wrong[:10], *notes),
        tests=seen.tests,
        measurements=seen.measurements or {},
        num_samples=seen.num_samples,
        sample_unit=seen.sample_unit,
        smallest_detectable=seen.smallest_detectable,
        effect_unit=seen.effect_unit,
        advice=seen.advice if wrong or seen.tests or seen.verdict is not Verdict.PASS else "",
        reproduce=reproduce(subject, plan, cell_id),
    )


def wrong_greedy_tokens(asking: Asking, scored: ScoredTraces, *, what: str) -> tuple[Finding, ...]:
    """Greedy tokens further below the target's first choice than the measured noise allows.

    One that the engine says without speculation, too, and right after its prefix, is its own numerics, as long as these
    can be: worth knowing, and no finding about speculation.
    """
    greedy = np.array([trace.request.params.greedy for trace in scored.traces], dtype=bool)
    concerned = greedy[scored["trace"].astype(np.int64)] if len(scored) else np.empty(0, bool)
    if not concerned.any():
        return ()
    texts = [trace.request.prompt_ids + trace.token_ids for trace in scored.traces if trace.request.params.greedy]
    subject, chunk = asking.subject, asking.plan.num_speculative_tokens + 1
    noise = measured_noise(subject.target, texts, chunk=chunk, engine_noise=subject.engine_noise)
    found = []
    for index in np.flatnonzero(concerned & (scored["gap"] > noise.allowed_gap))[:10]:
        trace = scored.traces[int(scored["trace"][index])]
        text = (
            f"{what}: token {int(scored['position'][index])} is {int(scored['token'][index])}, which is "
            f"{scored['gap'][index]:.3g} logits below the target's first choice (allowed {noise.allowed_gap:.2g})"
        )
        own = scored["gap"][index] <= MOST_OF_ENGINE and _said_alone(asking, trace, int(scored["position"][index]))
        if own:
            text += "; without speculation it says the same, so that is its numerics"
        place = f"{trace.request.id}, prompt {list(trace.request.prompt_ids)}"
        found.append(Finding(text=text, severity=Verdict.PASS if own else Verdict.FAIL, place=place))
    return tuple(found)


def _said_alone(asking: Asking, trace: DecodeTrace, position: int) -> bool:
    """Whether the OFF arm says the same token there, asked for it alone."""
    asked = replace(
        trace.request,
        id=f"{trace.request.id}, token {position} without speculation",
        prompt_ids=trace.request.prompt_ids + trace.token_ids[:position],
        params=replace(trace.request.params, max_new_tokens=1, min_new_tokens=0),
        num_samples=1,
        speculation=False,
    )
    (alone,) = asking.answers([asked])
    return alone.token_ids[:1] == trace.token_ids[position : position + 1]


def law_tests(
    asking: Asking, scored: ScoredTraces, *, name: str
) -> tuple[tuple[Finding, ...], tuple[StatisticalTest, ...]]:
    """Sampled tokens against the target's law: those outside its support, and the e-process of the others."""
    sampled = np.array([not trace.request.params.greedy for trace in scored.traces], dtype=bool)
    if not len(scored) or not sampled.any():
        return (), ()
    found = support(asking.subject, asking.plan, scored.where(sampled[scored["trace"].astype(np.int64)]))
    wrong = tuple(
        replace(each, text=f"{name}: {each.text}") for each in found.findings if each.severity is Verdict.FAIL
    )
    return wrong, (e_process_test(found.inside, asking.plan, name=name),) if len(found.inside) else ()


def drafted(traces: Iterable[DecodeTrace]) -> int:
    """Tokens that the steps say were drafted."""
    return sum(step.num_draft_tokens for trace in traces for step in trace.steps)
