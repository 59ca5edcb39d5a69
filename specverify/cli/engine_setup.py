"""`certify --engine NAME`: the same pair and prompts, decoded by somebody else's engine in place of the reference decoder."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specverify.engines import EngineSettings
from specverify.engines.arms import Guarded, TwoArms
from specverify.errors import PlanError, SubjectError
from specverify.models.loading import folder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specverify.cli.invocation import Invocation, Sources
    from specverify.plan import Plan
    from specverify.subject import Subject

__all__ = ["decoded_by_engine", "engine_settings"]


def engine_settings(invocation: Invocation, sources: Sources, subject: Subject, plan: Plan) -> EngineSettings:
    """The pair's folders and the engine's own options. Raises `PlanError` for what doesn't go together."""
    if invocation.fault:
        msg = (
            f"--fault {invocation.fault} is planted in the reference decoder, so leave --engine {invocation.engine} out"
        )
        raise PlanError(msg)
    pairs = [option.partition("=") for option in invocation.option]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        msg = f"--option {wrong} has no value; write --option {wrong}=VALUE"
        raise PlanError(msg)
    return EngineSettings(
        target=folder_of(sources.target) or Path(sources.target),
        draft=(folder_of(sources.draft) or Path(sources.draft)) if sources.draft is not None else None,
        num_speculative_tokens=plan.num_speculative_tokens,
        eos_token_ids=subject.eos_token_ids,
        max_length=min(subject.target.max_length, 4096),
        url=invocation.url,
        model=invocation.model,
        serve=invocation.serve,
        options=tuple((name, value) for name, _, value in pairs),
    )


@contextlib.contextmanager
def decoded_by_engine(
    invocation: Invocation, sources: Sources, subject: Subject, plan: Plan, *, say: Callable[[str], None]
) -> Iterator[Subject]:
    """The subject with that engine under test; what it started ends with the context.

    Its rule isn't known and its parts can't be driven, so checks that need either are NOT_RUN. Where it can't be asked
    without speculation, the reference decoder is the OFF arm. Its numerics are measured on its own OFF arm.
    """
    if not invocation.engine:
        yield subject
        return
    from specverify.checks.noise import noise_of_engine
    from specverify.conformance.run import opened_arms

    settings = engine_settings(invocation, sources, subject, plan)
    with opened_arms(invocation.engine, settings, off=invocation.off, say=say) as arms:
        off = arms.off if arms.off is not None else subject.engine
        engine = TwoArms(Guarded(arms.on), Guarded(off))
        noise = 0.0
        if arms.off is not None:
            with contextlib.suppress(SubjectError):  # an engine that breaks is the finding of the check that asks it
                noise = noise_of_engine(Guarded(arms.off), subject, plan)
                say(f"without speculation the engine's logits are seen to lie within {noise:.2g} of the target's")
        yield replace(subject, engine=engine, decoder=None, rule="", drafts_follow_law=False, engine_noise=noise)
