"""What the pytest plugin's fixtures do once one is used: here torch is imported, and nowhere before."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from specverify.certify import CHECKS, run_check
from specverify.cli.engine_setup import decoded_by_engine
from specverify.cli.invocation import Invocation
from specverify.cli.setup import make_subject
from specverify.door import plan_of
from specverify.engines import require_engine
from specverify.engines.reference import ReferenceEngine
from specverify.errors import ClaimViolated, UsageError
from specverify.judge import judge
from specverify.records import Verdict
from specverify.report.text import detectable, failure, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specverify.engines import Engine
    from specverify.subject import Subject

__all__ = ["Assertion", "Ledger", "in_one_sentence", "subject_of_options"]


@dataclass
class Ledger:
    """A test's share of the session's error budget: each assertion spends half of what is left."""

    left: float

    def spend(self) -> float:
        """The part of the next assertion."""
        self.left /= 2
        return self.left


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """A claim to call in a test."""

    check_id: str
    subject: Subject
    engine: Engine
    seed: int
    plan: dict[str, Any]
    """Fields that the test's marker sets."""
    ledger: Ledger
    record: Callable[[dict[str, Any]], None]
    reproduce: str

    def __call__(self, engine: Engine | None = None, **plan: Any) -> None:  # noqa: ANN401 - fields of Plan
        """Hold the claim of `engine`, or of the fixture's; keyword arguments are fields of the plan.

        Raises `ClaimViolated`, an AssertionError, for FAIL and for too little evidence, and `UsageError` for a field that
        can't be used; skips what can't be asked.
        """
        __tracebackhide__ = True
        share = self.ledger.spend()
        given = {
            "budget": "quick",
            "seed": self.seed,
            "false_fail_rate": share,
            **self.plan,
            **plan,
            "only": self.check_id,
        }
        check = next(each for each in CHECKS if each.id == self.check_id)
        try:
            asked = plan_of(**given)
            if engine is not None:
                require_engine(engine)
            result = run_check(check, _with(self.subject, engine or self.engine, asked.num_speculative_tokens), asked)
        except UsageError as error:  # the test's own line, then the sentence: what lies between is ours
            raise error.with_traceback(None) from None
        (result,), _ = judge([result], share)
        seen = f"{samples(result)}, smallest detectable {detectable(result)}"
        self.record({"check": self.check_id, "verdict": result.verdict, "share": share, "seen": seen})
        if result.verdict is Verdict.NOT_RUN:
            pytest.skip(f"{self.check_id}: {result.summary}")
        if result.verdict is not Verdict.PASS:
            raise ClaimViolated(failure(dataclasses.replace(result, reproduce=self.reproduce), seed=asked.seed))


@contextlib.contextmanager
def in_one_sentence() -> Iterator[None]:
    """A mistake in the options fails what needs them with its sentence alone."""
    try:
        yield
    except UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@contextlib.contextmanager
def subject_of_options(
    *, target: str | None, draft: str | None, engine: str | None, options: tuple[str, ...] = (), seed: int
) -> Iterator[Subject]:
    """The pair of the options, and the engine of that name while the session lasts."""
    plan = plan_of(budget="quick", seed=seed)
    drafter = "prompt-lookup" if target is not None and draft is None else "model"
    invocation = Invocation(target=target, draft=draft, drafter=drafter, engine=engine or "", option=options)
    sources = invocation.sources()
    subject = make_subject(invocation, sources, plan)
    with decoded_by_engine(invocation, sources, subject, plan, say=lambda _: None) as decoded:
        yield decoded


def _with(subject: Subject, engine: Engine, num_speculative_tokens: int) -> Subject:
    """The subject with another engine; the reference decoder's parts go along only where it is what is under test."""
    decoder = getattr(engine, "decoder", None)
    if decoder is None:
        return dataclasses.replace(subject, engine=engine, decoder=None, rule="", drafts_follow_law=False)
    if decoder.num_speculative_tokens != num_speculative_tokens and isinstance(engine, ReferenceEngine):
        decoder = dataclasses.replace(decoder, num_speculative_tokens=num_speculative_tokens)
        engine = dataclasses.replace(engine, decoder=decoder)
    return dataclasses.replace(subject, engine=engine, decoder=decoder)
