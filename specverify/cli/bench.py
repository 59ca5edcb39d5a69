"""`specverify bench` times verification and decoding against baselines, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES
from specverify.cli.invocation import Invocation, require_known

if TYPE_CHECKING:
    from specverify.bench import BenchReport, Change

__all__ = ["bench"]

Suite = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAME",
        help="verification, sampler, certification, pair, assisted, batch, prompt; or use commas.",
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=2, help="Turns of each contender.")]
VocabSizes = Annotated[str, typer.Option("--vocab-sizes", metavar="N,N,…", help="Of the verification suite.")]
CpuTime = Annotated[
    bool, typer.Option("--cpu-time", help="Count this process's time alone, where others use the cores; not on CUDA.")
]
Against = Annotated[
    Path | None, typer.Option("--against", metavar="FILE", help="An earlier record: say what became slower.")
]
Record = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where the record goes, with all raw times.")
]


def bench(
    target: options.Target = None,
    draft: options.Draft = None,
    *,
    pair: options.PairName = None,
    suite: Suite = None,
    repeats: Repeats = 7,
    vocab_sizes: VocabSizes = "50257,128256",
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    cpu_time: CpuTime = False,
    against: Against = None,
    out: Record = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Time verification steps and whole decodes, each against a baseline in the same run; without arguments, all.

    Every figure is a ratio of times taken in turns. With --against, ends with 1 where a ratio became worse than an
    earlier record's, and with 3 where that was made on another machine.
    """
    from specverify.codec import dump, write_text_atomically

    earlier = _earlier(against)
    report = _measured(
        Invocation(
            target=target, draft=draft, pair=pair, budget="quick", seed=seed, device=device, dtype=dtype,
            num_speculative_tokens=num_speculative_tokens,
        ),
        tuple(name.strip() for given in suite or () for name in given.split(",")),
        repeats,
        vocab_sizes,
        cpu_time=cpu_time,
        silent=quiet or as_json,
    )  # fmt: skip
    if out is not None:
        write_text_atomically(out, dump(report))
    changes = None if earlier is None else _changes(earlier, report)
    _show(report, changes, as_json=as_json, quiet=quiet)
    if changes is None:
        return 0
    from specverify.records import worst

    return EXIT_CODES[worst(change.verdict for change in changes)]


def _earlier(path: Path | None) -> BenchReport | None:
    if path is None:
        return None
    from specverify.bench import BenchReport
    from specverify.codec import load_as, read_text
    from specverify.errors import OutputError

    return load_as(BenchReport, read_text(path, "record", OutputError), source=str(path))


def _changes(earlier: BenchReport, report: BenchReport) -> tuple[Change, ...]:
    from specverify.bench import compared

    return compared(earlier, report)


def _measured(
    invocation: Invocation, suites: tuple[str, ...], repeats: int, vocab_sizes: str, *, cpu_time: bool, silent: bool
) -> BenchReport:
    from rich.console import Console

    from specverify.bench import SUITES, Sizes
    from specverify.bench import bench as measured
    from specverify.cli.progress import watching
    from specverify.cli.setup import make_subject
    from specverify.errors import PlanError
    from specverify.models.loading import resolve_device

    for name in suites:
        require_known("suite", name, SUITES)
    parts = [part.strip() for part in vocab_sizes.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        msg = f"--vocab-sizes '{vocab_sizes}' are no sizes; give numbers above 1, such as 50257,128256"
        raise PlanError(msg)
    sources, plan = invocation.sources(), invocation.plan()
    watch = watching(Console(stderr=True), quiet=silent, as_json=silent)
    try:
        return measured(
            suites or SUITES,
            Sizes(vocab_sizes=tuple(map(int, parts)), repeats=repeats, cpu_time=cpu_time),
            subject=lambda: make_subject(invocation, sources, plan),
            plan=plan,
            device=resolve_device(plan.device),
            command=invocation.command().replace("specverify certify", "specverify bench", 1),
            watch=watch,
        )
    finally:
        watch.close()


def _show(report: BenchReport, changes: tuple[Change, ...] | None, *, as_json: bool, quiet: bool) -> None:
    from specverify.codec import dump
    from specverify.report.bench import change_table, comparison_table

    if as_json:
        typer.echo(dump(report), nl=False)
    elif quiet:
        typer.echo(f"{len(report.comparisons)} comparisons" if changes is None else change_table(changes))
    else:
        typer.echo(comparison_table(report))
        if changes is not None:
            typer.echo(f"\n{change_table(changes)}")
