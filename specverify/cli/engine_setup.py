"""`certify --engine NAME`: the same pair and prompts, decoded by somebody else's engine in place of the reference decoder."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specverify.cli.invocation import require_known
from specverify.engines import EngineSettings
from specverify.engines.arms import Guarded, TwoArms
from specverify.errors import PlanError, SubjectError
from specverify.models.loading import folder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specverify.cli.invocation import Invocation, Sources
    from specverify.plan import Plan
    from specverify.records import Certificate
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["certified_without_target", "decoded_by_engine", "engine_settings"]


def engine_settings(
    invocation: Invocation, sources: Sources, plan: Plan, *, eos_token_ids: tuple[int, ...], max_length: int
) -> EngineSettings:
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
        eos_token_ids=eos_token_ids,
        max_length=min(max_length, 4096),
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

    eos, length = subject.eos_token_ids, subject.target.max_length
    settings = engine_settings(invocation, sources, plan, eos_token_ids=eos, max_length=length)
    with opened_arms(invocation.engine, settings, off=invocation.off, say=say) as arms:
        off = arms.off if arms.off is not None else subject.engine
        engine = TwoArms(Guarded(arms.on), Guarded(off))
        noise = 0.0
        if arms.off is not None:
            with contextlib.suppress(SubjectError):  # an engine that breaks is the finding of the check that asks it
                noise = noise_of_engine(Guarded(arms.off), subject, plan)
                say(f"without speculation the engine's logits are seen to lie within {noise:.2g} of the target's")
        yield replace(subject, engine=engine, decoder=None, rule="", drafts_follow_law=False, engine_noise=noise)


def certified_without_target(
    invocation: Invocation, sources: Sources, plan: Plan, *, watch: Watch, say: Callable[[str], None]
) -> Certificate:
    """`--score-by engine` and `texts`: of the target only the tokenizer and the configuration are read.

    See `conformance.by_engine` and `by_texts`. The draft is loaded where there is one: what leaks of it is then seen sooner.
    Raises what loading and opening raise.
    """
    from specverify.checks.compatibility import eos_ids
    from specverify.cli.setup import balanced, encode
    from specverify.conformance.by_engine import CELLS_WITHOUT_TARGET, certify_by_engine
    from specverify.conformance.by_texts import certify_by_texts
    from specverify.conformance.laws import Laws
    from specverify.conformance.run import opened_arms
    from specverify.models.absent import load_without_weights
    from specverify.models.fingerprint import fingerprint
    from specverify.models.loading import load_model
    from specverify.prompt_file import read_prompts

    for name in plan.only:
        require_known(f"check with --score-by {invocation.score_by}", name, CELLS_WITHOUT_TARGET)
    target = load_without_weights(sources.target, trust_remote_code=invocation.trust_remote_code)
    draft = None
    if sources.draft is not None:
        draft = load_model(
            sources.draft, device=plan.device, dtype=plan.dtype, trust_remote_code=invocation.trust_remote_code
        )
    room = min(one.model.max_length for one in (target, draft) if one is not None)
    prompts = encode(
        balanced(read_prompts(sources.prompts), plan.max_prompts),
        target,
        positions=room,
        max_new_tokens=plan.max_new_tokens,
        ours=invocation.prompts is None,
    )
    laws = Laws(
        target=target.model,
        draft=draft.model if draft is not None else None,
        prompts=prompts,
        eos_token_ids=eos_ids(target),
        fingerprints=(fingerprint(target), fingerprint(draft) if draft is not None else None),
    )
    settings = engine_settings(invocation, sources, plan, eos_token_ids=laws.eos_token_ids, max_length=room)
    with opened_arms(invocation.engine, settings, off=invocation.off, say=say) as arms:
        certified = certify_by_engine if invocation.score_by == "engine" else certify_by_texts
        return certified(arms.on, arms.off, laws, plan, watch=watch, command=invocation.command())
