"""`specverify certify` says whether a pair may go out."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES, Interrupted, crash_kept_in, say
from specverify.cli.invocation import Invocation
from specverify.errors import SpecverifyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from specverify.cli.invocation import Sources
    from specverify.plan import Plan
    from specverify.records import Certificate, ModelFingerprint
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["certify", "run"]


def certify(
    target: options.Target = None,
    draft: options.Draft = None,
    *,
    pair: options.PairName = None,
    prompts: options.Prompts = None,
    plan: options.PlanFile = None,
    budget: options.Budget = None,
    only: options.Only = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    rule: options.RuleName = "chain",
    branching: options.Branching = None,
    drafter: options.Drafter = "model",
    fault: options.FaultName = "",
    engine: options.EngineName = "",
    url: options.Url = "",
    model: options.Model = "",
    serve: options.Serve = "",
    option: options.EngineOption = None,
    off: options.OffEngine = "",
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = None,
    out: options.Out = None,
    resume: options.Resume = True,
    matrix: options.MatrixFile = None,
    ray: options.Ray = None,
    ray_workers: options.RayWorkers = None,
    ray_gpus: options.RayGpus = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Say whether speculative decoding changes what TARGET says, and whether TARGET and DRAFT may go out together.

    Without TARGET and DRAFT, the embedded pair is certified: offline, in about a minute on two idle CPU cores.
    """
    named = tuple(name.strip() for given in only or () for name in given.split(","))
    invocation = Invocation(
        target=target, draft=draft, pair=pair, drafter=drafter, rule=rule, fault=fault, prompts=prompts, plan_file=plan,
        num_speculative_tokens=num_speculative_tokens, budget=budget, only=named, seed=seed, out=out, device=device,
        dtype=dtype, device_map=device_map, branching=branching, trust_remote_code=trust_remote_code,
        engine=engine, url=url, model=model, serve=serve, option=tuple(option or ()), off=off,
    )  # fmt: skip
    cluster = None if ray is None else {"address": ray, "num_workers": ray_workers, "num_gpus": ray_gpus}
    if matrix is not None:
        from specverify.cli.matrix import certify_matrix

        return certify_matrix(matrix, invocation, cluster=cluster, resume=resume, quiet=quiet, as_json=as_json)
    with _nothing_stale(out):
        sources, asked = invocation.sources(), invocation.plan()
    folder = invocation.folder(sources, asked)
    with crash_kept_in(folder):
        certificate = run(
            invocation, sources, asked, folder, cluster=cluster, resume=resume, quiet=quiet, as_json=as_json
        )
        _show(certificate, folder, quiet=quiet, as_json=as_json)
    return EXIT_CODES[certificate.verdict]


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
    from specverify.cli.engine_setup import decoded_by_engine
    from specverify.cli.output import last_of, render, reserved, set_aside, write_all
    from specverify.cli.setup import make_subject, require_names
    from specverify.cli.store import FileStore, run_key

    tell = _nobody if quiet else say
    with _nothing_stale(folder):
        chosen(plan)
        require_names(invocation, plan)
    with reserved(folder):
        set_aside(folder)
        watch.stage("loading", 1)
        loaded = make_subject(invocation, sources, plan)
        digests = fingerprints(loaded)
        make = partial(make_subject, invocation, sources, plan)
        with (
            decoded_by_engine(invocation, sources, loaded, plan, say=tell) as subject,
            _computed_on(cluster, subject, plan, make, digests) as computed,
        ):
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
def _nothing_stale(out: Path | None) -> Iterator[None]:
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


def _show(certificate: Certificate, folder: Path, *, quiet: bool, as_json: bool) -> None:
    from specverify.cli.output import CERTIFICATE

    if as_json:
        typer.echo((folder / CERTIFICATE).read_text(encoding="utf-8"), nl=False)
    elif quiet:
        typer.echo(f"{certificate.verdict}  {certificate.headline}")
    else:
        from rich.console import Console

        from specverify.report.terminal import print_certificate

        print_certificate(certificate, Console(), path=folder / CERTIFICATE)
        typer.echo(f"report: {folder / 'report.html'}")
