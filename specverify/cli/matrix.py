"""`specverify certify --matrix FILE`: each cell as a certification of its own, then one table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specverify.cli.exits import EXIT_CODES, crash_kept_in
from specverify.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specverify.cli.invocation import Invocation
    from specverify.matrix import Cell, MatrixRow
    from specverify.matrix_file import Matrix
    from specverify.plan import Plan
    from specverify.records import Certificate

__all__ = ["certify_matrix"]

_VARIED = ("target", "draft", "pair", "plan_file", "num_speculative_tokens", "prompts", "fault")
"""What the matrix sets itself, or what has no place in it."""


def certify_matrix(
    file: Path, given: Invocation, *, cluster: Mapping[str, Any] | None, resume: bool, quiet: bool, as_json: bool
) -> int:
    """Certify every cell into a folder of its own, write and print the table; the exit code of the worst cell.

    An interrupted matrix resumes: finished cells are taken over from their checkpoints.
    """
    from specverify.matrix import rows_of, verdict_of
    from specverify.matrix_file import cells_of, read_matrix

    for name in _VARIED:
        if getattr(given, name):
            msg = f"--matrix says what is certified; leave {name.removesuffix('_file').replace('_', '-')} out of the command"
            raise UsageError(msg)
    matrix = read_matrix(file)
    out = given.out if given.out is not None else Path("specverify-out") / file.stem
    cells = list(cells_of(matrix))
    with crash_kept_in(out):
        certificates = [
            _cell(matrix, cell, given, out / cell.name, cluster=cluster, resume=resume, quiet=quiet, as_json=as_json)
            for cell in cells
        ]
        rows = rows_of(cells, certificates, matrix.false_discovery_rate)
        _write(out, rows, matrix.false_discovery_rate)
    for cell in cells:
        (out / cell.name / "checkpoint.json").unlink(missing_ok=True)
    _show(rows, matrix.false_discovery_rate, out, quiet=quiet, as_json=as_json)
    return EXIT_CODES[verdict_of(rows)]


def _cell(
    matrix: Matrix,
    cell: Cell,
    given: Invocation,
    folder: Path,
    *,
    cluster: Mapping[str, Any] | None,
    resume: bool,
    quiet: bool,
    as_json: bool,
) -> Certificate:
    """A certification as its own command would do it, with its plan beside it."""
    from specverify.cli.certify import run
    from specverify.cli.exits import say
    from specverify.codec import write_text_atomically
    from specverify.matrix_file import plan_text

    plan_file = folder / "plan.toml"
    write_text_atomically(plan_file, plan_text(matrix, cell))
    prompts = Path(matrix.prompts) if matrix.prompts else None
    invocation = dataclasses.replace(
        given, target=cell.target, draft=cell.draft, plan_file=plan_file, prompts=prompts, out=folder
    )
    wanted = _wanted_tokens(invocation.plan())
    if wanted and "lossless_tokens" not in matrix.plan:
        write_text_atomically(plan_file, plan_text(matrix, cell, lossless_tokens=wanted))
    if not quiet:
        say(f"cell {cell.name}")
    try:
        return run(
            invocation, invocation.sources(), invocation.plan(), folder, cluster=cluster, resume=resume, quiet=quiet,
            as_json=as_json, keep_checkpoint=True,
        )  # fmt: skip
    except UsageError as error:
        msg = f"cell {cell.name}: {error}"
        raise type(error)(msg) from error


def _wanted_tokens(plan: Plan) -> int:
    """Tokens of the stream that a share of the matrix's error budget asks for; 0 where the plan has enough."""
    from specverify.checks.evidence import detectable_shift, tokens_needed

    if detectable_shift(plan.lossless_tokens, plan) <= plan.largest_undetected_shift:
        return 0
    return tokens_needed(plan.largest_undetected_shift, plan)


def _write(out: Path, rows: list[MatrixRow], rate: float) -> None:
    from specverify.codec import write_text_atomically
    from specverify.report.matrix import as_object, render_matrix

    write_text_atomically(out / "matrix.md", render_matrix(rows, rate))
    write_text_atomically(out / "matrix.json", json.dumps(as_object(rows, rate), indent=2, sort_keys=True) + "\n")


def _show(rows: list[MatrixRow], rate: float, out: Path, *, quiet: bool, as_json: bool) -> None:
    from specverify.report.matrix import as_object, sentence, table

    if as_json:
        typer.echo(json.dumps(as_object(rows, rate)))
    elif quiet:
        typer.echo(sentence(rows, rate))
    else:
        typer.echo(f"{table(rows)}\n\n{sentence(rows, rate)}\ncertificates: {out}")
