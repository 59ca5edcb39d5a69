"""`specverify qualify` says whether somebody else's verifier is lossless."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from specverify.cli.exits import EXIT_CODES, crash_kept_in
from specverify.cli.options import AsJson, Quiet  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from specverify.qualify import Qualification
    from specverify.qualify.claims import ClaimResult

__all__ = ["qualify"]

Rule = Annotated[str, Option("--rule", metavar="MODULE:FUNCTION", help="The function; or chain, match, greedy.")]
ShapeName = Annotated[
    str | None,
    Option(
        "--shape",
        metavar="NAME",
        help="How it is called: specverify, transformers, vllm, flashinfer, plain, plain-batch.  [default: its parameters say]",
    ),
]
Seed = Annotated[int, Option(metavar="S", min=0, help="Of the examples, and of what is sampled.")]


def qualify(
    *, rule: Rule, shape: ShapeName = None, seed: Seed = 0, as_json: AsJson = False, quiet: Quiet = False
) -> int:
    """Say whether a verification function is lossless; if not, which claim fails, by how much, and the smallest example.

    The function runs as it is, with its random numbers replaced by every outcome that they can have: no sampling.
    """
    from specverify.qualify import load_rule
    from specverify.qualify import qualify as qualified

    function = load_rule(rule)
    with crash_kept_in(Path(tempfile.gettempdir())):
        found = qualified(function, name=rule, shape=shape, seed=seed)
        words = ["specverify", "qualify", "--rule", rule, *(["--shape", shape] if shape else []), "--seed", str(seed)]
        if as_json:
            typer.echo(json.dumps(_object(found, shlex.join(words)), indent=2))
        elif quiet:
            typer.echo(f"{found.verdict}  {_headline(found)}")
        else:
            _print(found, shlex.join(words))
    return EXIT_CODES[found.verdict]


def _headline(found: Qualification) -> str:
    if found.blamed is not None:
        return f"{found.rule}: {found.blamed.id}: {found.blamed.summary}"
    asked = sum(result.verdict != "NOT_RUN" for result in found.claims)
    return f"{found.rule}: {asked} of {len(found.claims)} claims were looked at, and none fails ({found.method})"


def _object(found: Qualification, reproduce: str) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "rule": found.rule,
        "shape": found.shape,
        "method": found.method,
        "seed": found.seed,
        "verdict": found.verdict,
        "headline": _headline(found),
        "blamed": found.blamed.id if found.blamed else None,
        "claims": [_claim(result) for result in found.claims],
        "reproduce": reproduce,
    }


def _claim(result: ClaimResult) -> dict[str, object]:
    plain: dict[str, object] = {
        name: getattr(result, name)
        for name in ("id", "claim", "verdict", "summary", "method", "effect", "num_instances", "advice")
    }
    if result.example is None:
        return plain | {"example": None}
    instance, deviation = result.example.instance, result.example.deviation
    laws = {
        name: {" ".join(map(str, prefix)): [str(each) for each in row] for prefix, row in rows.items()}
        for name, rows in (("target", instance.target), ("draft", instance.draft))
    }
    table = [{"outcome": said, "expected": expected, "actual": actual} for said, expected, actual in deviation.table]
    seen = {"place": deviation.place, "table": table, "looks_like": list(deviation.hints)}
    return plain | {"example": {"vocab_size": instance.vocab_size, "num_drafts": instance.num_drafts, **laws, **seen}}


def _print(found: Qualification, reproduce: str) -> None:
    """The claims, the failure to blame, the verdict last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specverify.qualify.text import failure
    from specverify.report.text import LABELS, MARKS, clean

    console = Console()
    console.print(Text(f"{found.rule}, called as {found.shape}, {found.method}, seed {found.seed}", style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("claim", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen", overflow="fold", ratio=1)
    for result in found.claims:
        table.add_row(result.id, f"{MARKS[result.verdict]} {LABELS[result.verdict]}", Text(clean(result.summary)))
    console.print(table)
    if found.blamed is not None:
        console.print()
        console.print(Text(clean(failure(found.blamed, reproduce=reproduce))), soft_wrap=True)
        others = [each.id for each in found.claims if each.verdict == "FAIL" and each is not found.blamed]
        if others:
            console.print(Text(f"Fail too, likely for the same reason: {', '.join(others)}"))
    console.print()
    console.print(Text(f"{MARKS[found.verdict]} {LABELS[found.verdict]}  {clean(_headline(found))}"))
