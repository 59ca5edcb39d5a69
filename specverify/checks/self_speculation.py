"""The target drafts for itself: a control that leaves the verifier's numerics alone to blame.

Note [Self-speculation]: with the target as its own draft, at temperature 0, every draft is what the target would say, so all of
them are accepted. A rejection means that the rows that verify a block say something else than the rows that wrote it, by more
than noise, or that the rule rejects what it should not; the draft model has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import asked, sampling, spread
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.records import Finding, SamplingParams
from specverify.scoring import score
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specverify.checks.noise import Noise
    from specverify.plan import Plan
    from specverify.subject import Subject

__all__ = ["SelfSpeculation", "self_speculation"]

_PROMPTS, _TOKENS = 4, 16


@dataclass(frozen=True)
class SelfSpeculation:
    """What came of drafts that were the target's own."""

    num_tested: int
    margins: NDArray[np.float64]
    """Of the target's first choice, in logits, where a draft was rejected."""

    def measurements(self) -> dict[str, float]:
        """The share that was accepted, where anything was drafted."""
        if not self.num_tested:
            return {}
        return {"self_speculation_acceptance": 1 - len(self.margins) / self.num_tested}

    def findings(self, noise: Noise) -> tuple[Finding, ...]:
        """Rejections that no near tie explains."""
        wrong = self.margins[self.margins > noise.allowed_gap]
        if not len(wrong):
            return ()
        text = (
            f"with the target as its own draft {len(wrong)} of {self.num_tested} drafts were rejected, the clearest where the "
            f"first choice leads by {wrong.max():.3g} logits (allowed {noise.allowed_gap:.2g})"
        )
        return (Finding(text=text, place="self-speculation"),)


def self_speculation(subject: Subject, plan: Plan) -> SelfSpeculation:
    """A few greedy texts of the reference decoder, drafted by its own target; nothing of another engine, or of a tree."""
    decoder = subject.decoder
    if decoder is None or decoder.drafts is not Drafts.CHAIN or not isinstance(decoder.drafter, DraftModel):
        return SelfSpeculation(0, np.empty(0))
    alone = replace(decoder, drafter=DraftModel(subject.target, subject.target.vocab_size))
    params = replace(
        sampling(subject, plan, SamplingParams(temperature=0)), max_new_tokens=min(_TOKENS, plan.max_new_tokens)
    )
    requests = asked("greedy/self", plan, spread(subject.prompts, _PROMPTS), params)
    traces = list(ReferenceEngine(alone, batch_size=plan.batch_size).decode(requests))
    tested, rejected = 0, []
    starts = np.concatenate(([0], np.cumsum([len(trace.token_ids) for trace in traces])))
    for start, trace in zip(starts.tolist(), traces, strict=False):
        at = start
        for step in trace.steps:
            tested += step.num_accepted_tokens
            if step.num_accepted_tokens < min(step.num_draft_tokens, step.num_emitted_tokens):
                tested += 1
                rejected.append(at + step.num_accepted_tokens)
            at += step.num_emitted_tokens
    if not rejected:
        return SelfSpeculation(tested, np.empty(0))
    return SelfSpeculation(tested, score(traces, target=subject.target)["margin"][rejected])
