"""`specverify detection`: tokens to proof of each structured fault, beside the tests and criteria in use."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations

__all__ = ["detection"]

Names = Annotated[list[str] | None, typer.Argument(metavar="[FAULT]...", help="These alone.", show_default=False)]
Runs = Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Streams of each fault.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=100, help="Budget of the e-process.")]
Compared = Annotated[int, typer.Option("--compared", metavar="N", min=100, help="Budget of the tests beside it.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Each fault as it is done, as JSON; the same command goes on from there."
    ),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="As the document docs/detection.md.")]


def detection(
    names: Names = None,
    *,
    pair: options.PairName = None,
    runs: Runs = 3,
    tokens: Tokens = 20_000,
    compared: Compared = 3_000,
    seed: options.Seed = None,
    out: Out = None,
    markdown: Markdown = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Count the tokens after which each structured fault is proved and named, beside KS, chi-square, MMD and criteria in use.

    Each fault takes a minute or more on the embedded pair, so all of them take some twenty; --out keeps those that are done.
    """
    from rich.console import Console

    from specverify.certify import environment
    from specverify.cli.invocation import Invocation
    from specverify.cli.kept import measurement_key, read_kept, write_kept
    from specverify.cli.progress import watching
    from specverify.cli.setup import make_subject
    from specverify.detection import Detections, detections, known_faults
    from specverify.report.detection import render_detections, sentence, table

    chosen = known_faults(names or ())
    invocation = Invocation(pair=pair, budget="quick", seed=seed)
    sources, plan = invocation.sources(), invocation.plan()
    subject = make_subject(invocation, sources, plan)
    key = measurement_key(subject, plan, runs=runs, tokens=tokens, compared=compared)
    kept = read_kept(out, Detections(key=key))
    watch = watching(Console(stderr=True), quiet=quiet, as_json=as_json)
    found = []
    try:
        for one in detections(
            subject, plan, chosen, tokens=tokens, compared=compared, runs=runs, finished=kept.found, watch=watch
        ):
            found.append(one)
            if one not in kept.found:
                kept = replace(kept, found=(*kept.found, one))
                write_kept(out, kept)
    finally:
        watch.close()
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    elif markdown:
        command = " ".join(
            [
                "specverify detection",
                *(names or ()),
                f"--runs {runs} --tokens {tokens} --compared {compared} --seed {plan.seed} --markdown",
            ]
        )
        made_in = environment(subject.target.device, plan.dtype)
        date = datetime.now(UTC).date().isoformat()
        typer.echo(
            render_detections(found, command=command, environment=made_in, date=date, compared=compared), nl=False
        )
    else:
        typer.echo(sentence(found) if quiet else f"{table(found)}\n\n{sentence(found)}")
    return 0
