"""`specverify qualify ENGINE` says whether speculation in a whole engine is sound."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specverify.cli.exits import EXIT_CODES, Interrupted, crash_kept_in, say
from specverify.errors import PlanError, UsageError
from specverify.report.text import clean

if TYPE_CHECKING:
    from specverify.conformance import EngineRun
    from specverify.plan import Plan
    from specverify.records import Certificate

__all__ = ["EngineCommand", "qualify_engine", "write_pair"]


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """The arguments and options of `specverify qualify ENGINE`, as they were given."""

    engine: str
    target: Path | None = None
    draft: Path | None = None
    url: str = ""
    model: str = ""
    serve: str = ""
    options: tuple[str, ...] = ()
    off: str = ""
    budget: str = "standard"
    only: tuple[str, ...] = ()
    seed: int | None = None
    num_speculative_tokens: int = 3
    max_length: int = 256
    max_batch_size: int = 16
    fault: str = ""
    out: Path | None = None

    def plan(self) -> Plan:
        """Raises `PlanError`."""
        from specverify.conformance import engine_plan

        seed = 17 if self.seed is None else self.seed
        if not 1 <= self.num_speculative_tokens <= 64:
            msg = f"--num-speculative-tokens is {self.num_speculative_tokens}; it must be 1 to 64"
            raise PlanError(msg)
        return engine_plan(self.budget, seed=seed, num_speculative_tokens=self.num_speculative_tokens, only=self.only)

    def run(self) -> EngineRun:
        """Raises `UsageError` where the options don't go together."""
        from specverify.conformance import EngineRun
        from specverify.engines import EngineSettings

        if self.draft is not None and self.target is None:
            msg = "give --target DIR with --draft DIR, or neither, and a calibration pair is written"
            raise UsageError(msg)
        if self.target is not None and not self.target.is_dir():
            msg = f"the target {self.target} is no folder; give the one that holds config.json"
            raise UsageError(msg)
        pairs = [option.partition("=") for option in self.options]
        if wrong := next(
            (option for option, (_, equals, _) in zip(self.options, pairs, strict=True) if not equals), None
        ):
            msg = f"--option {wrong} has no value; write --option {wrong}=VALUE"
            raise UsageError(msg)
        settings = EngineSettings(
            target=self.target if self.target is not None else Path(),
            draft=self.draft,
            max_length=self.max_length,
            max_batch_size=self.max_batch_size,
            url=self.url,
            model=self.model,
            serve=self.serve,
            options=tuple((name, value) for name, _, value in pairs),
        )
        return EngineRun(name=self.engine, settings=settings, off=self.off, fault=self.fault, command=self.words())

    def words(self) -> str:
        """The command line, but for `--only`, `--seed` and `--budget`, which a reproduction sets itself."""
        words = ["specverify", "qualify", self.engine]
        usual = EngineCommand(engine=self.engine)
        for name in (
            "target", "draft", "url", "model", "serve", "off", "num_speculative_tokens", "max_length", "max_batch_size", "fault",
        ):  # fmt: skip
            if getattr(self, name) != getattr(usual, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for option in self.options:
            words += ["--option", option]
        return shlex.join(words)

    def folder(self) -> Path:
        """Where the certificate goes."""
        name = re.sub(r"[^\w.+-]+", "-", self.engine)
        return (
            self.out
            if self.out is not None
            else Path("specverify-out") / (f"engine-{name}-fault-{self.fault}" if self.fault else f"engine-{name}")
        )


def qualify_engine(command: EngineCommand, *, as_json: bool, quiet: bool) -> int:
    """Run, write the certificate, show it; the exit code."""
    from rich.console import Console

    from specverify.cli.output import CERTIFICATE, render, require_other_folder, reserved, write_all
    from specverify.cli.progress import watching
    from specverify.conformance import run_engine

    plan, run, folder = command.plan(), command.run(), command.folder()
    require_other_folder(folder, (command.target, command.draft))
    watch = watching(Console(stderr=True), quiet=quiet, as_json=as_json)
    try:
        with crash_kept_in(folder), reserved(folder):
            certificate = run_engine(run, plan, watch=watch, say=_nobody if quiet else say)
            write_all(folder, render(certificate))
            _show(certificate, folder / CERTIFICATE, as_json=as_json, quiet=quiet)
    except KeyboardInterrupt as error:
        msg = "interrupted; what was started has ended, and nothing was written"
        raise Interrupted(msg) from error
    finally:
        watch.close()
    return EXIT_CODES[certificate.verdict]


def _nobody(sentence: str) -> None:
    del sentence


def _show(certificate: Certificate, path: Path, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    elif quiet:
        typer.echo(f"{certificate.verdict}  {clean(certificate.headline)}")
    else:
        from rich.console import Console

        from specverify.report.terminal import print_certificate

        print_certificate(certificate, Console(), path=path)
        typer.echo(f"report: {path.with_name('report.html')}")


def write_pair(folder: Path) -> int:
    """The near calibration pair in a folder of the user's, for a server that they start themselves."""
    import importlib.util

    from specverify.models.calibration import write_calibration_pair

    pair = write_calibration_pair(
        folder, opposed=False, one_head=True, gguf=importlib.util.find_spec("gguf") is not None
    )
    typer.echo(f"target: {pair.target}\ndraft: {pair.draft}")
    for role, file in (("target", pair.target_gguf), ("draft", pair.draft_gguf)):
        if file is not None:
            typer.echo(f"{role} as GGUF: {file}")
    typer.echo(
        f"Start your server with it, then: specverify qualify NAME --url URL --target {pair.target} --draft {pair.draft}"
    )
    return 0
