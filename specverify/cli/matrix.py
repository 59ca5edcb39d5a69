"""`specverify certify --matrix FILE`: each cell as a certification of its own, then one table."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specverify.cli.exits import EXIT_CODES, crash_kept_in, say
from specverify.errors import UsageError
from specverify.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specverify.cli.invocation import Invocation
    from specverify.matrix import Cell, MatrixRow
    from specverify.matrix_file import Matrix

__all__ = ["certify_matrix"]

_VARIED = ("target", "draft", "pair", "plan_file", "num_speculative_tokens", "prompts", "fault")
"""What the matrix sets itself, or what has no place in it."""
_OUT = "specverify-out"
_PLAN = "plan.toml"
"""The file's name in a cell's folder."""
_TABLES = ("matrix.md", "matrix.json")


def certify_matrix(
    file: Path, given: Invocation, *, cluster: Mapping[str, Any] | None, resume: bool, quiet: bool, as_json: bool
) -> int:
    """Certify every cell into a folder of its own, write and print the table; the exit code of the worst cell.

    What any cell can be refused for is refused before the first is certified. An interrupted matrix resumes: finished cells
    are taken over from their checkpoints.
    """
    from specverify.cli.output import move_aside, render, reserved, write_all
    from specverify.cli.run import run, unmet_by
    from specverify.matrix import named_lossy, rows_of
    from specverify.matrix_file import cells_of, read_matrix

    for name in _VARIED:
        if getattr(given, name):
            msg = f"--matrix says what is certified; leave {name.removesuffix('_file').replace('_', '-')} out of the command"
            raise UsageError(msg)
    matrix = read_matrix(file)
    out = given.out if given.out is not None else Path(_OUT) / file.stem
    cells = list(cells_of(matrix))
    tell = _nobody if quiet else say
    with crash_kept_in(out):
        move_aside(out, _TABLES)  # an earlier table is not this one's, whether it ends or is refused
        try:
            invocations = [_invocation(matrix, cell, given, out / cell.name) for cell in cells]
            _require_possible(cells, invocations, tell)
        except UsageError:
            _take_back(out, cells)
            raise
        certificates = []
        for cell, each in zip(cells, invocations, strict=True):
            tell(f"cell {cell.name}")
            with _named(cell):
                certificates.append(
                    run(
                        each, each.sources(), each.plan(), out / cell.name, cluster=cluster, resume=resume, quiet=quiet,
                        as_json=as_json, keep_checkpoint=True,
                    )
                )  # fmt: skip
        unmet = [tuple(unmet_by(certificate, given)) for certificate in certificates]
        rows = rows_of(cells, certificates, matrix.named_rate, unmet)
        for row, certificate in zip(rows, certificates, strict=True):
            if (failed := named_lossy(certificate, row)) is not certificate:
                with reserved(out / row.cell.name):
                    write_all(out / row.cell.name, render(failed))
        _write(out, rows, matrix.named_rate)
    for cell in cells:
        (out / cell.name / "checkpoint.json").unlink(missing_ok=True)
    _show(rows, matrix.named_rate, out, quiet=quiet, as_json=as_json)
    return _exit_code(rows, given)


def _exit_code(rows: Sequence[MatrixRow], given: Invocation) -> int:
    from specverify.matrix import verdict_of

    code = EXIT_CODES[verdict_of(rows)]
    if given.policy is None or code == EXIT_CODES[Verdict.FAIL]:
        return code
    return (code or EXIT_CODES[Verdict.FAIL]) if any(row.unmet for row in rows) else EXIT_CODES[Verdict.PASS]


def _invocation(matrix: Matrix, cell: Cell, given: Invocation, folder: Path) -> Invocation:
    """A certification as its own command would do it, with its plan in the cell's folder."""
    from specverify.codec import write_text_atomically
    from specverify.matrix_file import plan_text
    from specverify.policy_plan import with_enough_tokens

    plan_file = folder / _PLAN
    write_text_atomically(plan_file, plan_text(matrix, cell))
    prompts = Path(matrix.prompts) if matrix.prompts else None
    invocation = dataclasses.replace(
        given, target=cell.target, draft=cell.draft, plan_file=plan_file, prompts=prompts, out=folder
    )
    with _named(cell):
        plan = invocation.plan()
    enough = with_enough_tokens(plan).lossless_tokens
    if enough > plan.lossless_tokens and "lossless_tokens" not in matrix.plan:
        write_text_atomically(plan_file, plan_text(matrix, cell, lossless_tokens=enough))
    return invocation


def _require_possible(cells: Sequence[Cell], invocations: Sequence[Invocation], tell: Callable[[str], None]) -> None:
    """Refuse now what a cell would be refused for after hours of others: names first, then each pair is loaded once.

    The first cell's pair is not, because it is loaded next.
    """
    from specverify.certify import chosen
    from specverify.cli.setup import make_subject, require_names
    from specverify.models.loading import require_model
    from specverify.prompt_file import read_prompts

    for cell, each in zip(cells, invocations, strict=True):
        with _named(cell):
            sources, plan = each.sources(), each.plan()
            chosen(plan)
            require_names(each, plan)
            read_prompts(sources.prompts)
            for model in (sources.target, sources.draft):
                if model is not None:
                    require_model(model)
    known = {(cells[0].target, cells[0].draft)}
    for cell, each in zip(cells, invocations, strict=True):
        if (cell.target, cell.draft) not in known:
            known.add((cell.target, cell.draft))
            tell(f"checking {cell.target} with {cell.draft}, which comes later")
            with _named(cell):
                make_subject(each, each.sources(), each.plan())


def _take_back(out: Path, cells: Sequence[Cell]) -> None:
    """Folders that hold a plan and nothing else were made for a matrix that was refused."""
    for folder in (out / cell.name for cell in cells):
        if folder.is_dir() and {each.name for each in folder.iterdir()} <= {_PLAN}:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty: an earlier run's
        for folder in (out, *(each for each in out.parents if each.name == _OUT)):
            folder.rmdir()


@contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """A refusal says which cell it is of."""
    try:
        yield
    except UsageError as error:
        msg = f"cell {cell.name}: {error}"
        raise type(error)(msg) from error


def _nobody(sentence: str) -> None:
    del sentence


def _write(out: Path, rows: list[MatrixRow], rate: float) -> None:
    from specverify.codec import write_text_atomically
    from specverify.report.matrix import as_object, render_matrix

    texts = (render_matrix(rows, rate), json.dumps(as_object(rows, rate), indent=2, sort_keys=True) + "\n")
    for name, text in zip(_TABLES, texts, strict=True):
        write_text_atomically(out / name, text)


def _show(rows: list[MatrixRow], rate: float, out: Path, *, quiet: bool, as_json: bool) -> None:
    from specverify.report.matrix import as_object, reasons, sentence, table

    if as_json:
        typer.echo(json.dumps(as_object(rows, rate)))
    elif quiet:
        typer.echo(sentence(rows, rate))
    else:
        typer.echo("\n".join((table(rows), "", sentence(rows, rate), f"certificates: {out}", *reasons(rows))))
