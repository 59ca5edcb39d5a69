"""The job: which of two drafts is accepted more by one target? On the same text, position by position.

Note [Paired drafts]: acceptance differs more from position to position than from draft to draft. So both drafts are held
against the same text of the target alone, and the unit is the difference of Σ min(p, q) at one position, with intervals by prompt:
nothing is drafted, and there is no noise of accepting in it. The exact programme then turns each draft's posterior acceptances
into tokens a step at every number of speculative tokens (Note [Posterior acceptance] in `statistics.acceptance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.checks.acceptance import MOST_SPECULATIVE_TOKENS, tokens_per_step_interval
from specverify.checks.check import asked, sampling
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PlanError
from specverify.records import Verdict
from specverify.scoring import score
from specverify.statistics.interval import Interval, cluster_interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["DraftComparison", "compare_drafts", "paired_difference"]


@dataclass(frozen=True, kw_only=True)
class DraftComparison:
    """What two drafts are worth to one target; a difference is second minus first."""

    num_tokens: int
    num_prompts: int
    expected_acceptance: tuple[Interval, Interval]
    """Mean Σ min(p, q) of each, clustered by prompt."""
    difference: Interval
    """Of the same, position by position."""
    tokens_per_step: tuple[Mapping[int, Interval], Mapping[int, Interval]]
    """Of each, by number of speculative tokens."""

    @property
    def verdict(self) -> Verdict:
        """PASS where the second is accepted more, FAIL where it is accepted less, INCONCLUSIVE where 0 is inside."""
        if self.difference.low > 0:
            return Verdict.PASS
        return Verdict.FAIL if self.difference.high < 0 else Verdict.INCONCLUSIVE


def paired_difference(first: ScoredTraces, second: ScoredTraces, *, confidence: float = 0.95) -> Interval:
    """Mean of Σ min(p, q) under the second draft minus that under the first, on the same tokens, by prompt.

    Raises `PlanError` where the tokens aren't the same.
    """
    if [trace.token_ids for trace in first.traces] != [trace.token_ids for trace in second.traces]:
        msg = "the two drafts were held against different texts, so their difference is not paired"
        raise PlanError(msg)
    return cluster_interval(second["overlap"] - first["overlap"], first.prompts(), confidence=confidence)


def compare_drafts(
    subject: Subject, second: LanguageModel, plan: Plan, *, tokens: int, confidence: float = 0.95
) -> DraftComparison:
    """The subject's draft and another one, over target-only text of the subject's prompts.

    Raises `PlanError` where the subject has no reference decoder or no draft model.
    """
    if subject.decoder is None or subject.draft is None:
        msg = "two draft models are compared, on text of the reference decoder; leave out --drafter"
        raise PlanError(msg)
    params = sampling(subject, plan)
    samples = max(1, -(-tokens // (params.max_new_tokens * len(subject.prompts))))
    engine = ReferenceEngine(subject.decoder, batch_size=plan.batch_size, workers=subject.workers)
    requests = asked("drafts", plan, subject.prompts, params, num_samples=samples, speculation=False)
    traces = list(engine.decode(requests))
    scored = [
        score(traces, target=subject.target, draft=draft, workers=subject.workers) for draft in (subject.draft, second)
    ]
    numbers = range(1, MOST_SPECULATIVE_TOKENS + 1)
    per_step = [{g: tokens_per_step_interval(each, g, seed=plan.seed) for g in numbers} for each in scored]
    return DraftComparison(
        num_tokens=len(scored[0]),
        num_prompts=len(subject.prompts),
        expected_acceptance=(
            cluster_interval(scored[0]["overlap"], scored[0].prompts(), confidence=confidence),
            cluster_interval(scored[1]["overlap"], scored[1].prompts(), confidence=confidence),
        ),
        difference=paired_difference(*scored, confidence=confidence),
        tokens_per_step=(per_step[0], per_step[1]),
    )
