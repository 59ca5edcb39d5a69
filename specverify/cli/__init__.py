"""The command line. Nothing heavy is imported until a command needs it, so that help and mistakes answer at once."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli.bench import bench
from specverify.cli.calibrate import calibrate
from specverify.cli.certify import certify
from specverify.cli.compare import compare
from specverify.cli.detection import detection
from specverify.cli.drafts import drafts
from specverify.cli.exits import guarded, leave, terminable
from specverify.cli.faults import faults
from specverify.cli.gate import gate
from specverify.cli.golden import app as golden
from specverify.cli.init import init
from specverify.cli.options import AsJson, Quiet  # noqa: TC001 - typer reads the annotations
from specverify.cli.qualify import qualify
from specverify.cli.rank import rank

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app", "main"]

app = typer.Typer(
    name="specverify",
    help="Does speculative decoding change what a model says, and may this pair go out?",
    epilog="Exit codes: 0 pass, 1 fail, 2 usage, 3 inconclusive, 70 a bug in specverify, 130 interrupted, 143 terminated.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(short_help="Certify a target and a draft; without arguments, the embedded pair.")(certify)
app.command(short_help="May these files be served on the strength of a certificate?")(gate)
app.command(short_help="Write a commented policy for the gate.")(init)
app.command(short_help="Count false alarms over many runs without a fault.")(calibrate)
app.command(short_help="Is speculation in an engine sound, or with --rule a verifier lossless?")(qualify)
app.command(short_help="Plant known faults, and show which check catches them.")(faults)
app.add_typer(golden, name="golden")
app.command(short_help="Compare two certificates, pairs or goldens, or watch a running server.")(compare)
app.command(short_help="Tokens to proof of each structured fault, beside the tests and criteria in use.")(detection)
app.command(short_help="Say which of two drafts a target accepts more, on the same text.")(drafts)

app.command(short_help="Time verification and decoding against baselines, in turns.")(bench)
app.command(short_help="Which draft, and how many tokens: measured, for a target and some drafts.")(rank)


def _print_version(asked: bool) -> None:
    if asked:
        from specverify import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version, and nothing else.")
    ] = False,
) -> None:
    """Does speculative decoding change what a model says, and may this pair go out?"""
    del version


@app.command()
def version(*, as_json: AsJson = False, quiet: Quiet = False) -> int:
    """The versions that a certificate depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from specverify import __version__

    versions = {"specverify": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "numpy"):
        try:
            versions[package] = installed(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        typer.echo(__version__ if quiet else "\n".join(f"{name:<13}{value}" for name, value in versions.items()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code. Never raises, but for a `SystemExit` of somebody else's.

    main(["certify", "--only", "compatibility"])
    """
    given = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> int | None:
        return app(given or ["--help"], prog_name="specverify", standalone_mode=False)  # type: ignore[no-any-return]  # typer hands on what the command returns

    if arguments is not None:  # called from somebody's own program, whose signals are its own
        return guarded(command, as_json="--json" in given)
    with terminable():
        code = guarded(command, as_json="--json" in given)
    return leave(code)
