"""The stopping check in two cells: an engine that breaks at stop strings may still end well at ids and lengths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specverify.checks.check import Check, reproduce
from specverify.checks.stop_requests import detokenizer
from specverify.checks.stopping import stopping
from specverify.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import CheckResult
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["stop_strings", "stops"]


def _rounds(subject: Subject, plan: Plan, *, strings: bool) -> Iterable[Round]:
    """Target-only texts, and the requests of one kind. Raises `PlanError` where there is no text to stop at."""
    if strings and detokenizer(subject) is None:
        msg = f"{subject.engine.name} takes no stop strings"
        raise PlanError(msg)
    for each in stopping.rounds(subject, plan):
        kept = tuple(one for one in each if not one.speculation or bool(one.params.stop_strings) is strings)
        if kept:
            yield kept


def _conclude(check_id: str, claim: str, subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    found = stopping.conclude(subject, plan, scored)
    return replace(found, id=check_id, claim=claim, reproduce=reproduce(subject, plan, check_id))


def _cell(check_id: str, claim: str, *, strings: bool) -> Check:
    return Check(
        id=check_id,
        claim=claim,
        rounds=partial(_rounds, strings=strings),
        conclude=partial(_conclude, check_id, claim),
    )


stops = _cell(
    "stopping", "a text ends at its first EOS, stop id or limit, whatever the offset in a block", strings=False
)
stop_strings = _cell(
    "stop_strings",
    "a text ends with the token that completes a stop string, whatever the offset in a block",
    strings=True,
)
