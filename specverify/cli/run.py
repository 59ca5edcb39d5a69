"""One certification, from a command line's arguments to the files: what `certify` does, and a matrix for each of its cells."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from specverify.cli.exits import Interrupted, say
from specverify.cli.tensor_parallel import led, require_usable
from specverify.errors import PlanError, SpecverifyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from specverify.cli.invocation import Invocation, Sources
    from specverify.plan import Plan
    from specverify.records import Certificate, ModelFingerprint
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["nothing_stale", "run", "unmet_by"]


def run(
    invocation: Invocation,
    sources: Sources,
    plan: Plan,
    folder: Path,
    *,
    cluster: Mapping[str, Any] | None,
    resume: bool,
    quiet: bool,
    as_json: bool,
    keep_checkpoint: bool = False,
) -> Certificate:
    """Everything that can be refused is refused first; then load, certify, write."""
    from rich.console import Console

    from specverify.cli.progress import watching

    require_usable(invocation, others="--ray" if cluster is not None else "")
    watch = watching(Console(stderr=True), quiet=quiet, as_json=as_json)
    try:
        return _certified(
            invocation, sources, plan, folder, cluster=cluster, watch=watch, resume=resume, quiet=quiet,
            keep_checkpoint=keep_checkpoint,
        )  # fmt: skip
    except KeyboardInterrupt as error:
        msg = "interrupted; run the same command again to resume"
        raise Interrupted(msg) from error
    finally:
        watch.close()


def _certified(
    invocation: Invocation,
    sources: Sources,
    plan: Plan,
    folder: Path,
    *,
    cluster: Mapping[str, Any] | None,
    watch: Watch,
    resume: bool,
    quiet: bool,
    keep_checkpoint: bool,
) -> Certificate:
    from dataclasses import replace

    from specverify.certify import certify as certified
    from specverify.certify import chosen, fingerprints
    from specverify.cli.engine_setup import certified_without_target, decoded_by_engine
    from specverify.cli.output import last_of, render, require_other_folder, reserved, set_aside, write_all
    from specverify.cli.setup import make_subject, require_names
    from specverify.cli.store import FileStore, run_key

    tell = _nobody if quiet else say
    require_other_folder(folder, (sources.target, sources.draft))
    if invocation.score_by != "target":
        if cluster is not None:
            msg = f"--score-by {invocation.score_by} loads no target, so there is nothing for a cluster to compute; leave --ray out"
            raise PlanError(msg)
        with reserved(folder):
            set_aside(folder)
            certificate = certified_without_target(invocation, sources, plan, watch=watch, say=tell)
            certificate = replace(certificate, command=invocation.whole_command())
            write_all(folder, render(certificate, last_of(folder)))
            return certificate
    with nothing_stale(folder):
        chosen(plan)
        require_names(invocation, plan)
    with reserved(folder), led(invocation, plan) as processes:
        set_aside(folder)
        watch.stage("loading", 1)
        loaded = make_subject(invocation, sources, plan, processes=processes)
        digests = fingerprints(loaded)
        make = partial(make_subject, invocation, sources, plan)
        with (
            decoded_by_engine(invocation, sources, loaded, plan, say=tell) as subject,
            _computed_on(cluster, subject, plan, make, digests) as computed,
        ):
            _require_possible(invocation, subject, plan)
            key = run_key(subject, plan, digests, fault=invocation.fault)
            store = FileStore(folder, key, resume=resume, say=tell)
            watch.advance()
            certificate = certified(
                computed,
                plan,
                watch=watch,
                store=store,
                fault=invocation.fault,
                trust_remote_code=invocation.trust_remote_code,
                digests=digests,
            )
        certificate = replace(certificate, command=invocation.whole_command())
        certificate = _named(certificate, sources) if invocation.target is None else certificate
        write_all(folder, render(certificate, last_of(folder)))
        if keep_checkpoint:
            store.finish()
        else:
            store.remove()
        return certificate


def unmet_by(certificate: Certificate, invocation: Invocation) -> list[str]:
    """What `specverify gate` will hold against a certificate by the invocation's policy; empty without one."""
    from specverify.gate import unmet
    from specverify.report.text import at_most

    if invocation.policy is None:
        return []
    return [f"{each.reason:<10}{at_most(each.text, 400)}" for each in unmet(certificate, invocation.wanted())]


def _require_possible(invocation: Invocation, subject: Subject, plan: Plan) -> None:
    """Raise `PolicyError` for a run whose certificate no policy of this file can let out, before it has cost anything."""
    from specverify.certify import chosen, environment
    from specverify.errors import PolicyError
    from specverify.gate import foreseen

    if invocation.policy is None:
        return
    policy = invocation.wanted()
    reasons = list(
        foreseen(
            policy,
            environment(subject.target.device, plan.dtype),
            engine=subject.engine.name,
            trust_remote_code=invocation.trust_remote_code,
            num_prompts=len(subject.prompts),
        )
    )
    running = {check.id for check in chosen(plan)}
    reasons += [
        f"{name} is required and does not run; use --budget deep"
        for name in policy.required_checks
        if not plan.only and name not in running
    ]
    if reasons:
        msg = f"this run can't meet {invocation.policy}: {reasons[0]}"
        raise PolicyError(msg)


def _computed_on(
    cluster: Mapping[str, Any] | None,
    subject: Subject,
    plan: Plan,
    make: Callable[[], Subject],
    digests: tuple[ModelFingerprint, ModelFingerprint | None],
) -> AbstractContextManager[Subject]:
    """This process, or a Ray cluster: what is decoded and scored is the same."""
    if cluster is None:
        return nullcontext(subject)
    from specverify.cluster import sharded

    return sharded(subject, plan, make, digests=digests, say=say, **cluster)


def _named(certificate: Certificate, sources: Sources) -> Certificate:
    """An embedded pair goes by its name, not by where it is installed."""
    from dataclasses import replace
    from pathlib import Path

    target = replace(certificate.target, name=f"embedded {Path(sources.target).name}")
    draft = certificate.draft
    if draft is not None and sources.draft is not None:
        draft = replace(draft, name=f"embedded {Path(sources.draft).name}")
    return replace(certificate, target=target, draft=draft)


@contextmanager
def nothing_stale(out: Path | None) -> Iterator[None]:
    """What an earlier run left in a folder that was named does not stand beside the refusal of this one."""
    try:
        yield
    except SpecverifyError:
        if out is not None and out.is_dir():
            from specverify.cli.output import reserved, set_aside

            with suppress(SpecverifyError), reserved(out):
                set_aside(out)
        raise


def _nobody(sentence: str) -> None:
    del sentence
