"""`specverify init` writes a commented policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations

__all__ = ["init"]

Where = Annotated[Path, typer.Argument(metavar="[FILE.toml]", help="Where it goes.")]
Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a policy, and write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def init(
    where: Where = Path("specverify.toml"),
    *,
    schema: Schema = False,
    force: Force = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Write a policy for `specverify gate`, with a comment beside each key."""
    from specverify.codec import write_text_atomically
    from specverify.errors import OutputError
    from specverify.policy_file import commented_policy, policy_schema

    if schema:
        typer.echo(json.dumps(policy_schema(), indent=2))
        return 0
    if where.exists() and not force:
        msg = f"{where} is there already; name another file, or write over it with --force"
        raise OutputError(msg)
    write_text_atomically(where, commented_policy())
    if as_json:
        typer.echo(json.dumps({"written": str(where)}))
    elif not quiet:
        typer.echo(f"wrote {where}; now: specverify gate CERTIFICATE TARGET DRAFT --policy {where}")
    return 0
