"""parameters: every sampling parameter is honoured at every position of a block, drafts included."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from specverify.checks.check import Check, asked, reproduce, sampling, spread
from specverify.checks.counters import nothing_drafted
from specverify.checks.evidence import (
    EXTENSION,
    detectable_shift,
    e_process,
    e_process_test,
    pit_tests,
    proof,
    settled,
    support,
    suspicious,
    told_suspicion,
)
from specverify.plan import PARAMETER_GRID
from specverify.records import CheckResult, Plot, PlotKind, Series, Verdict
from specverify.scoring import score

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import Finding, SamplingParams, StatisticalTest
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["over", "parameters"]

Grid: TypeAlias = "tuple[tuple[str, SamplingParams], ...]"

_BANNED = 8
_MORE = "/more-"
"""In the ids of requests that a suspicion asks for."""


def _likeliest_tokens(subject: Subject) -> tuple[tuple[int, ...], ...]:
    """The target's most frequent first choices over the prompts: a ban on them is felt everywhere."""
    first = Counter(
        token
        for prompt in spread(subject.prompts, _BANNED)
        for token in subject.target.logits([prompt.token_ids])[0].argmax(-1).tolist()
    )
    return tuple((token,) for token, _ in first.most_common(_BANNED) if token not in subject.eos_token_ids)


def _too_few_ids(subject: Subject, plan: Plan) -> bool:
    longest = max((len(prompt.token_ids) for prompt in subject.prompts), default=0)
    return subject.target.vocab_size <= longest + plan.max_new_tokens


@torch.inference_mode()
def _cells(grid: Grid, subject: Subject, plan: Plan) -> Iterable[tuple[str, SamplingParams]]:
    for name, params in grid:
        cell = sampling(subject, plan, params)
        if params.no_repeat_ngram_size == 1 and _too_few_ids(subject, plan):
            cell = replace(cell, no_repeat_ngram_size=3)  # single tokens would run out
        yield name, replace(cell, banned_token_ids=_likeliest_tokens(subject)) if name == "banned_words" else cell


def _rounds(grid: Grid, subject: Subject, plan: Plan) -> Iterable[Round]:
    """All cells in one round: rows with unlike parameters are each other's neighbours. More of them where a cell is suspicious."""
    wanted = max(1, plan.parameter_tokens // plan.max_new_tokens)
    prompts = spread(subject.prompts, wanted)
    samples = max(1, -(-wanted // len(prompts)))
    cells = list(_cells(grid, subject, plan))
    for number in range(EXTENSION):
        yield [
            request
            for name, cell in cells
            for request in asked(
                f"parameters/{name}{_MORE + str(number) if number else ''}", plan, prompts, cell, num_samples=samples
            )
        ]


def _decided(plan: Plan, scored: ScoredTraces) -> bool:
    """Unless a cell is suspicious and no proof yet."""
    inside = (cell.where(cell["edge"] == 0) for cell in _by_cell(scored).values())
    return all(settled(e_process(cell).log10_e, plan) for cell in inside if len(cell))


def _by_cell(scored: ScoredTraces) -> dict[str, ScoredTraces]:
    of_trace = [request.id.split("/")[1] for request in scored.requests()]
    cell_of_token = np.array(of_trace)[scored["trace"].astype(np.int64)]
    return {name: scored.where(cell_of_token == name) for name in dict.fromkeys(of_trace)}


def _of_first_round(scored: ScoredTraces) -> ScoredTraces:
    """What has a p-value must not depend on what it says."""
    first = np.array([_MORE not in request.id for request in scored.requests()], dtype=bool)
    return scored.where(first[scored["trace"].astype(np.int64)])


def _with_bet_on_penalty(subject: Subject, cell: ScoredTraces) -> ScoredTraces:
    """A penalty that is dropped moves no support and little of the order, so the law without it is bet on by itself."""
    indices = sorted({int(index) for index in cell["trace"]})
    traces = [cell.traces[index] for index in indices]
    if all(trace.request.params.repetition_penalty == 1 for trace in traces):
        return cell
    unpenalised = [
        replace(trace, request=replace(trace.request, params=replace(trace.request.params, repetition_penalty=1.0)))
        for trace in traces
    ]
    without = score(unpenalised, target=subject.target, workers=subject.workers)["prob"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(cell["prob"] > 0, without / cell["prob"], 1.0)  # what is outside the support is judged before
    together = ChainMap({"the penalty is ignored": ratio}, cell.fault_ratios)  # type: ignore[arg-type]  # only read
    return replace(cell, fault_ratios=together)


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    findings: list[Finding] = []
    tests, counts, evidence = [], {}, {}
    unsettled = ""
    for name, tokens in _by_cell(scored).items():
        cell = support(subject, plan, _with_bet_on_penalty(subject, tokens))
        counts[f"num_tokens_{name}"] = len(cell.inside)
        findings += [replace(finding, text=f"{name}: {finding.text}") for finding in cell.findings]
        unsettled = unsettled if cell.settled else f"{findings[-1].text}: too many to say that the support holds"
        if len(cell.inside):
            tests.append(e_process_test(cell.inside, plan, name=name))
            evidence[name] = tests[-1].log10_e or 0.0
    all_inside = _of_first_round(scored.where(scored["edge"] == 0))
    pooled = pit_tests(all_inside, plan, name="all settings", chi_square=False) if len(all_inside) else ()
    thinnest = min(counts, key=counts.__getitem__, default="")
    detectable = detectable_shift(counts.get(thinnest, 0), plan)
    verdict, summary = _verdict(plan, scored, findings, unsettled, tests, thinnest=thinnest, detectable=detectable)
    return CheckResult(
        id="parameters",
        claim=parameters.claim,
        verdict=verdict,
        summary=summary,
        findings=tuple(findings),
        tests=(*tests, *pooled),
        measurements=counts,
        num_samples=len(scored),
        smallest_detectable=detectable,
        effect_unit="shift of the mean PIT law within one setting",
        advice=""
        if verdict is Verdict.INCONCLUSIVE and not any(suspicious(test.log10_e or 0.0) for test in tests)
        else "apply each parameter to every row of the block, with the drafts before it in view",
        reproduce=reproduce(subject, plan, "parameters"),
        plots=(_plot(evidence, proof(plan)),),
    )


def _plot(evidence: Mapping[str, float], limit: float) -> Plot:
    return Plot(
        id="parameters/evidence",
        title="Evidence against the target in each setting",
        x_label="setting",
        y_label="log10 of the e-value",
        kind=PlotKind.BAR,
        series=(
            Series(label="evidence", x=tuple(evidence), y=tuple(evidence.values())),
            Series(label="fails from here at the latest", x=(-0.5, len(evidence) - 0.5), y=(limit, limit), dashed=True),
        ),
        caption="Short of zero or around it: no evidence. As far as the dashed line: this setting's law is not the target's.",
    )


def _verdict(
    plan: Plan,
    scored: ScoredTraces,
    findings: Sequence[Finding],
    unsettled: str,
    tests: Sequence[StatisticalTest],
    *,
    thinnest: str,
    detectable: float,
) -> tuple[Verdict, str]:
    """Before the judge has held the tests against the budget."""
    wrong = [finding for finding in findings if finding.severity is Verdict.FAIL]
    if wrong:
        return Verdict.FAIL, f"{wrong[0].text} ({wrong[0].place})"
    if nothing_drafted(scored.traces):
        return Verdict.INCONCLUSIVE, "nothing was drafted, so nothing was shown"
    if unsettled:
        return Verdict.INCONCLUSIVE, unsettled
    asked = f"{len({request.id.split('/')[1] for request in scored.requests()})} settings, {len(scored):,} tokens"
    suspect = max(tests, key=lambda test: test.log10_e or 0.0, default=None)
    if suspect is not None and suspicious(suspect.log10_e or 0.0):
        said = f"evidence 10^{suspect.log10_e:.1f} to 1, {suspect.name}"
        return Verdict.INCONCLUSIVE, told_suspicion(said, suspect.log10_e or 0.0, plan, proven=asked)
    wanted = plan.largest_undetected_shift_per_setting
    if detectable > wanted:
        # a fifth more, since texts may end early
        needed = math.ceil(1.2 * plan.parameter_tokens * (min(detectable, 1.0) / wanted) ** 2)
        setting = thinnest.removeprefix("num_tokens_")
        said = f"too few tokens: in {setting} a shift of the mean law below {detectable:.2g} would go unseen"
        return Verdict.INCONCLUSIVE, f"{said}, {wanted:.2g} is wanted; set parameter_tokens = {needed} in the plan"
    return Verdict.PASS, f"{asked}: none outside the support that the target allows"


def over(grid: Grid) -> Check:
    """The check of another grid: names and parameters, where `banned_words` gets its ids from the pair."""
    return Check(
        id="parameters",
        claim="temperature, top-k, top-p, min-p, penalties and bans hold at every position of a block",
        rounds=partial(_rounds, grid),
        decided=_decided,
        wanted_tokens=lambda plan: len(grid) * plan.parameter_tokens,
        conclude=_conclude,
    )


parameters = over(PARAMETER_GRID)
"""A small grid; in each cell the support is checked token by token, and the distribution by PIT and e-process."""
