"""Whole checks on hashed models: a healthy subject, and what a check asks and says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.models.hashed import VOCAB_SIZE, HashedModel, detokenize
from specverify.scoring import ScoredTraces, score
from specverify.subject import EncodedPrompt, Subject

if TYPE_CHECKING:
    from specverify.checks.check import Check
    from specverify.engines import Engine
    from specverify.plan import Plan
    from specverify.records import CheckResult


def subject(decoder: Decoder | None = None, engine: Engine | None = None, *, rounding: float = 0.0) -> Subject:
    """A healthy decoder over hashed models and sixteen prompts, or the one given."""
    target = HashedModel(rounding=rounding)
    draft = HashedModel("draft", seed=1, near=HashedModel(), rounding=rounding)
    decoder = decoder or Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE), detokenize=detokenize)
    prompts = tuple(
        EncodedPrompt(id=f"p{number}", domain="test", token_ids=tuple(range(number, number + 1 + number % 3)))
        for number in range(16)
    )
    return Subject(
        engine=engine or ReferenceEngine(decoder),
        target=target,
        draft=draft,
        prompts=prompts,
        decoder=decoder,
        rule="chain",
    )


def answered(check: Check, asked_of: Subject, plan: Plan) -> ScoredTraces:
    """Everything that the check asks, decoded and scored."""
    scored = ScoredTraces()
    for requests in check.rounds(asked_of, plan):
        traces = list(asked_of.engine.decode(requests))
        scored = scored.merge(
            score(traces, target=asked_of.target, draft=asked_of.draft, stages=asked_of.rule == "chain")
        )
    return scored


def concluded(check: Check, asked_of: Subject, plan: Plan) -> CheckResult:
    """What the check says about the subject."""
    return check.conclude(asked_of, plan, answered(check, asked_of, plan))
