"""`specverify golden` records what a pair does, and says which layer changed first when it does something else."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES, crash_kept_in
from specverify.cli.invocation import Invocation
from specverify.report.text import clean

if TYPE_CHECKING:
    from specverify.cli.invocation import Sources
    from specverify.golden.records import GoldenReport, Recording
    from specverify.models.loading import Pair
    from specverify.records import Prompt
    from specverify.watch import Watch

__all__ = ["MAX_PROMPTS", "GoldenRequest", "app", "checked", "has_new", "record_golden"]

MAX_PROMPTS = 12

app = typer.Typer(help="Record what a pair does, and explain an upgrade layer by layer.", rich_markup_mode=None)

Target = Annotated[
    str | None,
    typer.Argument(metavar="[PAIR | TARGET]", help="An embedded pair, or the target's folder.", show_default=False),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why it is recorded; kept in the golden.")]
Update = Annotated[bool, typer.Option("--update", help="Record again what is recorded already.")]
Goldens = Annotated[Path, typer.Option("--goldens", metavar="DIR", help="Folder of the goldens.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the golden.  [default: the pair's]")]
MaxPrompts = Annotated[int, typer.Option("--max-prompts", metavar="N", min=1, help="Evenly from every domain.")]


@dataclass(frozen=True, kw_only=True)
class GoldenRequest:
    """Which pair, and which golden."""

    target: str | None = None
    draft: str | None = None
    drafter: str = "model"
    prompts: Path | None = None
    goldens: Path = Path("golden")
    name: str | None = None
    max_prompts: int = MAX_PROMPTS
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    @property
    def sources(self) -> Sources:
        """Where models and prompts come from. One word that is no folder names an embedded pair."""
        from specverify.pairs import embedded_pairs

        shipped = self.target is None or (self.draft is None and self.target in embedded_pairs())
        invocation = Invocation(
            target=None if shipped else self.target,
            draft=None if shipped else self.draft,
            pair=self.target if shipped else None,
            drafter=self.drafter,
            prompts=self.prompts,
        )
        return invocation.sources()

    @property
    def folder(self) -> Path:
        """Of the golden."""
        return self.goldens / (self.name or self.sources.name)

    def asked(self) -> tuple[Prompt, ...]:
        """The prompts of today."""
        from specverify.cli.setup import balanced
        from specverify.prompt_file import read_prompts

        return balanced(read_prompts(self.sources.prompts), self.max_prompts)

    def load(self) -> Pair:
        """Target and draft, whether or not they fit: that is for the layers to say."""
        from specverify.models.loading import load_pair

        sources = self.sources
        return load_pair(
            sources.target,
            sources.draft,
            device=self.device or "auto",
            dtype=self.dtype or "float32",
            trust_remote_code=self.trust_remote_code,
        )

    def command(self, verb: str, *, reason: str = "", update: bool = False) -> str:
        """The command line; to record, with a place for the reason where none is given."""
        words = ["specverify", "golden", verb, *(word for word in (self.target, self.draft) if word is not None)]
        usual = GoldenRequest()
        for name in ("drafter", "prompts", "goldens", "name", "max_prompts", "device", "dtype"):
            if getattr(self, name) != getattr(usual, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        words += ["--trust-remote-code"] if self.trust_remote_code else []
        words += ["--update"] if update else []
        words += ["--reason", reason or "TEXT"] if verb == "record" else []
        return shlex.join(words)


@app.command()
def record(
    target: Target = None,
    draft: options.Draft = None,
    *,
    reason: Reason,
    update: Update = False,
    drafter: options.Drafter = "model",
    prompts: options.Prompts = None,
    goldens: Goldens = Path("golden"),
    name: Name = None,
    max_prompts: MaxPrompts = MAX_PROMPTS,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Record what a pair does: what is recorded already stays as it is, unless --update is given."""
    import json

    request = GoldenRequest(
        target=target, draft=draft, drafter=drafter, prompts=prompts, goldens=goldens, name=name,
        max_prompts=max_prompts, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _require_reason(reason)
    with crash_kept_in(Path("specverify-out")):
        number = record_golden(request, reason, update=update, watch=_watch(quiet=quiet, as_json=as_json))
    if as_json:
        typer.echo(json.dumps({"golden": str(request.folder), "recorded_prompts": number}))
    else:
        typer.echo(f"recorded {number} prompts in {request.folder}")
    return 0


@app.command()
def check(
    target: Target = None,
    draft: options.Draft = None,
    *,
    drafter: options.Drafter = "model",
    prompts: options.Prompts = None,
    goldens: Goldens = Path("golden"),
    name: Name = None,
    max_prompts: MaxPrompts = MAX_PROMPTS,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Hold a pair against its golden: which layer changed first, what only follows from it, and whether it matters."""
    request = GoldenRequest(
        target=target, draft=draft, drafter=drafter, prompts=prompts, goldens=goldens, name=name,
        max_prompts=max_prompts, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with crash_kept_in(Path("specverify-out")):
        report = checked(request, watch=_watch(quiet=quiet, as_json=as_json))
    _show(report, request, quiet=quiet, as_json=as_json)
    return EXIT_CODES[report.verdict]


def checked(request: GoldenRequest, *, watch: Watch) -> GoldenReport:
    """The report of a pair against its golden. Raises `OutputError` with the record command where there is none."""
    from specverify.golden import job
    from specverify.golden_file import read_recording

    old = read_recording(request.folder, command=request.command("record"))
    asked = request.asked()
    watch.stage("loading", 1)
    pair = request.load()
    watch.stage("golden", job.STAGES)
    now = job.provenance(
        pair.target.model.device, request.dtype or "float32", command=request.command("check"), reason=""
    )
    try:
        return job.check(pair, old, asked, provenance=now, watch=watch)
    finally:
        watch.close()


def has_new(request: GoldenRequest) -> bool:
    """Whether some prompt has no golden yet, and none is recorded with another text."""
    from specverify.golden import job
    from specverify.golden_file import read_recording, recorded

    if not recorded(request.folder):
        return True
    old = read_recording(request.folder, command=request.command("record")).golden
    missing, unused = job.missing_and_unused(old, request.asked())
    return bool(missing) and not set(missing) & set(unused)


def record_golden(request: GoldenRequest, reason: str, *, update: bool, watch: Watch) -> int:
    """Prompts recorded: all of them, or with a golden there and no `--update` the new ones."""
    from specverify.cli.output import reserved
    from specverify.golden import job
    from specverify.golden_file import read_recording, recorded, write_recording

    asked = request.asked()
    old = (
        read_recording(request.folder, command=request.command("record"))
        if recorded(request.folder) and not update
        else None
    )
    if old is not None:
        asked = _new_ones(old, asked, request)
    with reserved(request.folder):
        watch.stage("loading", 1)
        pair = request.load()
        watch.stage("golden", job.STAGES if old is None else 2 * job.STAGES)
        dtype = request.dtype or "float32"
        by = job.provenance(
            pair.target.model.device,
            dtype,
            command=request.command("record", reason=reason, update=update),
            reason=reason,
        )
        try:
            if old is not None:
                _require_unchanged(job.check(pair, old, provenance=by, watch=watch), request)
            fresh = job.record(pair, asked, name=request.folder.name, provenance=by, watch=watch)
        finally:
            watch.close()
        write_recording(request.folder, fresh if old is None else job.extended(old, fresh))
    return len(asked)


def _new_ones(old: Recording, asked: tuple[Prompt, ...], request: GoldenRequest) -> tuple[Prompt, ...]:
    from specverify.errors import OutputError
    from specverify.golden import job

    missing, unused = job.missing_and_unused(old.golden, asked)
    changed = sorted(set(missing) & set(unused))
    command = request.command("record", update=True)
    if changed:
        msg = f"the prompt {changed[0]!r} is recorded with another text; record again: {command}"
        raise OutputError(msg)
    if not missing:
        msg = f"{request.folder} is recorded already, and nothing is new; to record it again: {command}"
        raise OutputError(msg)
    return tuple(prompt for prompt in asked if prompt.id in missing)


def _require_unchanged(report: GoldenReport, request: GoldenRequest) -> None:
    """New prompts go only to a golden that still holds."""
    from specverify.errors import OutputError

    if report.causes:
        msg = (
            f"new prompts can't be added to {request.folder}: {report.headline}; "
            f"to record all again: {request.command('record', update=True)}"
        )
        raise OutputError(msg)


def _require_reason(reason: str) -> None:
    from specverify.errors import UsageError

    if not reason.strip():
        msg = "--reason is empty; say in a few words why the golden is recorded"
        raise UsageError(msg)


def _watch(*, quiet: bool, as_json: bool) -> Watch:
    from rich.console import Console

    from specverify.cli.progress import watching

    return watching(Console(stderr=True), quiet=quiet, as_json=as_json)


def _show(report: GoldenReport, request: GoldenRequest, *, quiet: bool, as_json: bool) -> None:
    from specverify.codec import dump
    from specverify.report.golden import render_golden

    if as_json:
        typer.echo(dump(report), nl=False)
    elif quiet:
        typer.echo(f"{report.verdict}  {clean(report.headline)}")
    else:
        typer.echo(render_golden(report, record_command=request.command("record")))
