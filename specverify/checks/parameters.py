"""parameters: every sampling parameter is honoured at every position of a block, drafts included."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.check import Check, asked, reproduce, sampling, spread
from specverify.checks.evidence import e_process_test, impossible_tokens, pit_tests
from specverify.plan import PARAMETER_GRID
from specverify.records import CheckResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import SamplingParams
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["parameters"]

_BANNED = 8


def _likeliest_tokens(subject: Subject) -> tuple[tuple[int, ...], ...]:
    """The target's most frequent first choices over the prompts: a ban on them is felt everywhere."""
    first = Counter(
        token
        for prompt in spread(subject.prompts, _BANNED)
        for token in subject.target.logits([prompt.token_ids])[0].argmax(-1).tolist()
    )
    return tuple((token,) for token, _ in first.most_common(_BANNED) if token not in subject.eos_token_ids)


@torch.inference_mode()
def _cells(subject: Subject, plan: Plan) -> Iterable[tuple[str, SamplingParams]]:
    for name, params in PARAMETER_GRID:
        cell = sampling(subject, plan, params)
        yield name, replace(cell, banned_token_ids=_likeliest_tokens(subject)) if name == "banned_words" else cell


def _rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    """All cells in one round: rows with unlike parameters are each other's neighbours."""
    wanted = max(1, plan.parameter_tokens // plan.max_new_tokens)
    prompts = spread(subject.prompts, wanted)
    samples = max(1, -(-wanted // len(prompts)))
    yield [
        request
        for name, cell in _cells(subject, plan)
        for request in asked(f"parameters/{name}", plan, prompts, cell, num_samples=samples)
    ]


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    findings, tests, counts = [], [], {}
    of_trace = [trace.request.id.split("/")[1] for trace in scored.traces]
    cell_of_token = np.array(of_trace)[scored["trace"].astype(np.int64)]
    for name, _ in PARAMETER_GRID:
        cell = scored.where(cell_of_token == name)
        counts[f"num_tokens_{name}"] = len(cell)
        if not len(cell):
            continue
        findings += [replace(finding, text=f"{name}: {finding.text}") for finding in impossible_tokens(cell)]
        tests.append(e_process_test(cell, name=name))
    pooled = pit_tests(scored, plan, name="all settings", chi_square=False) if len(scored) else ()
    steps = [step for trace in scored.traces for step in trace.steps]
    drafted = sum(step.num_draft_tokens for step in steps)
    detectable = min((test.smallest_detectable or 1.0 for test in pooled), default=1.0)
    verdict = Verdict.FAIL if findings else Verdict.PASS
    summary = f"{len(PARAMETER_GRID)} settings, {len(scored):,} tokens: none outside the support that the target allows"
    if findings:
        summary = f"{findings[0].text} ({findings[0].place})"
    elif steps and not drafted:
        verdict, summary = Verdict.INCONCLUSIVE, "nothing was drafted, so nothing was shown"
    elif detectable > plan.largest_undetected_tv:
        verdict = Verdict.INCONCLUSIVE
        summary = f"too few tokens: a distance below {detectable:.2g} would go unseen"
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
        effect_unit="Kolmogorov distance",
        advice="apply each parameter to every row of the block, with the drafts before it in view" if findings else "",
        reproduce=reproduce(subject, plan, "parameters"),
    )


parameters = Check(
    id="parameters",
    claim="temperature, top-k, top-p, min-p, penalties and bans hold at every position of a block",
    rounds=_rounds,
    conclude=_conclude,
)
"""A small grid; in each cell the support is checked token by token, and the distribution by PIT and e-process."""
