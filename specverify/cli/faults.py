"""`specverify faults` plants every fault and shows which check catches it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.faults import Fault
    from specverify.kill_matrix import KillMatrix

__all__ = ["faults"]

_WORKERS = 2
"""Processes: the small models are Python, which threads don't speed up."""

Names = Annotated[list[str] | None, typer.Argument(metavar="[FAULT]...", help="These alone.", show_default=False)]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="CHECK", help="These checks alone, or use commas.")]
List = Annotated[bool, typer.Option("--list", help="Name them, and plant nothing.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="As a Markdown document.")]
Scopes = Annotated[
    bool,
    typer.Option("--scopes", help="As the document docs/scopes.md: the size of tables at which each wrong rule shows."),
]
Pair = Annotated[
    str | None,
    typer.Option("--pair", metavar="NAME", help="Plant them in an embedded pair instead of models of 24 ids: slow."),
]


def faults(
    names: Names = None,
    *,
    only: Only = None,
    pair: Pair = None,
    list_: List = False,
    markdown: Markdown = False,
    scopes: Scopes = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Plant each known fault, ask every check of correctness, and show which one catches it after how many samples.

    Ends with 1 if a check lets a fault pass that it is known to catch.
    """
    from specverify.faults import FAULTS, find_fault
    from specverify.report.faults import render_faults, sentence, table

    chosen = tuple(map(find_fault, names)) if names else FAULTS
    if scopes:
        from specverify.report.scopes import render_scopes
        from specverify.scopes import scope_table

        typer.echo(render_scopes(scope_table([fault.name for fault in chosen])), nl=False)
        return 0
    if list_:
        _list(chosen, as_json=as_json, quiet=quiet)
        return 0
    checks = [name.strip() for given in only or () for name in given.split(",")]
    matrix = _measured(chosen, checks, pair, quiet=quiet, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(_as_object(matrix), indent=2))
    elif quiet:
        typer.echo(sentence(matrix))
    elif markdown:
        typer.echo(render_faults(matrix), nl=False)
    else:
        typer.echo(f"{table(matrix)}\n\n{sentence(matrix)}")
    return 1 if matrix.missed else 0


def _list(chosen: Sequence[Fault], *, as_json: bool, quiet: bool) -> None:
    """Names, what they stand for, and what is known to catch them."""
    if as_json:
        typer.echo(json.dumps({"faults": [_named(fault) for fault in chosen]}, indent=2))
        return
    if quiet:
        typer.echo("\n".join(fault.name for fault in chosen))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    listed.add_column("fault", no_wrap=True)
    listed.add_column("stands for")
    listed.add_column("caught by")
    for fault in chosen:
        listed.add_row(Text(fault.name), Text(fault.stands_for), Text(", ".join(fault.caught_by)))
    Console().print(listed)


def _measured(
    chosen: Sequence[Fault], checks: Sequence[str], pair: str | None, *, quiet: bool, as_json: bool
) -> KillMatrix:
    """The matrix of the small models, or of a pair."""
    from rich.console import Console

    from specverify.cli.invocation import Invocation
    from specverify.cli.progress import watching
    from specverify.kill_matrix import kill_matrix

    watch = watching(Console(stderr=True), quiet=quiet, as_json=as_json)
    try:
        if pair is None:
            return kill_matrix(chosen, checks, workers=_WORKERS, watch=watch)
        from specverify.cli.setup import make_subject

        invocation = Invocation(pair=pair, budget="quick")
        sources, plan = invocation.sources(), invocation.plan()
        return kill_matrix(
            chosen, checks, subject=lambda: make_subject(invocation, sources, plan), plan=plan, watch=watch
        )
    finally:
        watch.close()


def _named(fault: Fault) -> dict[str, object]:
    return {"name": fault.name, "stands_for": fault.stands_for, "caught_by": list(fault.caught_by)}


def _as_object(matrix: KillMatrix) -> dict[str, object]:
    rows = [
        {
            **_named(fault),
            "checks": {
                cell.check_id: {
                    "verdict": cell.verdict,
                    "num_samples": cell.num_samples,
                    "sample_unit": cell.sample_unit,
                    "crossed_at_tokens": cell.crossed_at_tokens,
                    "summary": cell.summary,
                }
                for cell in matrix.cells
                if cell.fault == fault.name
            },
        }
        for fault in matrix.faults
    ]
    return {
        "faults": rows,
        "missed": [[cell.fault, cell.check_id] for cell in matrix.missed],
        "empty_rows": list(matrix.empty_rows),
        "empty_columns": list(matrix.empty_columns),
    }
