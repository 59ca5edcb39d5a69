"""`specverify calibrate` counts false alarms on the user's own machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES
from specverify.cli.invocation import Invocation

if TYPE_CHECKING:
    from specverify.calibrate import Calibration

__all__ = ["calibrate"]

Runs = Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Runs without a fault.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Counts after each run, as JSON; the same command goes on from there."),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=100, help="Tokens of the sampled stream in each.")]

_CHECKS = ("lossless", "acceptance")
"""The checks with statistics that take a stream; others are calibrated when `--only` names them."""


def calibrate(
    target: options.Target = None,
    draft: options.Draft = None,
    *,
    pair: options.PairName = None,
    prompts: options.Prompts = None,
    runs: Runs = 100,
    tokens: Tokens = 1_000,
    only: options.Only = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    out: Out = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Count false alarms over many runs without a fault, and hold them against what each test promises.

    Each run decodes and scores --tokens tokens; a hundred take some minutes on the embedded pair. With --out more --runs may be
    asked for later.
    """
    from rich.console import Console

    from specverify.calibrate import Counted
    from specverify.calibrate import calibrate as calibrated
    from specverify.certify import chosen
    from specverify.cli.kept import measurement_key, read_kept, write_kept
    from specverify.cli.progress import watching
    from specverify.cli.setup import make_subject

    named = tuple(name.strip() for given in only or _CHECKS for name in given.split(","))
    invocation = Invocation(
        target=target, draft=draft, pair=pair, prompts=prompts, budget="quick", only=named, seed=seed, device=device,
        dtype=dtype,
    )  # fmt: skip
    sources = invocation.sources()
    plan = replace(
        invocation.plan(),
        lossless_tokens=tokens,
        first_token_samples=max(50, tokens // 10),
        max_new_tokens=16,  # with the batch, rounds of about a thousand tokens
        batch_size=64,
    )
    chosen(plan)
    subject = make_subject(invocation, sources, plan)
    counted = read_kept(out, Counted(key=measurement_key(subject, plan)))
    watch = watching(Console(stderr=True), quiet=quiet, as_json=as_json)
    try:
        calibration = calibrated(
            subject, plan, runs=runs, counted=counted, keep=lambda now: write_kept(out, now), watch=watch
        )
    finally:
        watch.close()
    _show(calibration, as_json=as_json, quiet=quiet)
    return EXIT_CODES[calibration.verdict]


def _show(calibration: Calibration, *, as_json: bool, quiet: bool) -> None:
    broken, open_ = (
        sum(promise.verdict == verdict for promise in calibration.promises) for verdict in ("FAIL", "INCONCLUSIVE")
    )
    said = (
        f"{calibration.verdict}  {calibration.num_failed} of {calibration.num_runs} runs without a fault were failed; "
        f"{broken} of {len(calibration.promises)} promised false-alarm rates are exceeded"
        + (f", {open_} need more --runs to tell" if open_ else "")
    )
    if as_json:
        rows = [
            {**asdict(promise), "seen_from": promise.seen_from, "verdict": promise.verdict}
            for promise in calibration.promises
        ]
        answer = {
            "verdict": calibration.verdict, "num_runs": calibration.num_runs, "num_failed": calibration.num_failed,
            "promises": rows,
        }  # fmt: skip
        typer.echo(json.dumps(answer, indent=2))
        return
    if not quiet:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("check", "test", "promised", "observed", "interval", "seen from", box=None, padding=(0, 2, 0, 0))
        for promise in calibration.promises:
            observed = promise.observed
            table.add_row(
                promise.check_id,
                Text(promise.test),
                f"≤ {promise.promised:g}",
                f"{promise.num_alarms}/{promise.num_runs}",
                Text(f"{observed.low:.3f}–{observed.high:.3f}", style="bold red" if promise.verdict == "FAIL" else ""),
                f"{promise.seen_from:.3f}",
            )
        Console().print(table)
    typer.echo(said)
