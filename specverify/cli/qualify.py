"""`specverify qualify` says whether somebody else's verifier is lossless, or a whole engine sound."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from specverify.cli.exits import EXIT_CODES, crash_kept_in
from specverify.cli.options import (  # noqa: TC001 - typer reads the annotations
    AsJson,
    EngineOption,
    Model,
    OffEngine,
    Quiet,
    Serve,
    Url,
)
from specverify.cli.qualify_engine import EngineCommand, qualify_engine, write_pair
from specverify.errors import UsageError
from specverify.report.text import clean

if TYPE_CHECKING:
    from specverify.qualify import Qualification
    from specverify.qualify.claims import ClaimResult

__all__ = ["qualify"]

EngineName = Annotated[
    str | None,
    Argument(metavar="[ENGINE]", help="A built-in name such as transformers, or module:callable.", show_default=False),
]
Rule = Annotated[
    str | None,
    Option("--rule", metavar="MODULE:FUNCTION", help="A verification function instead; or chain, match, greedy."),
]
TargetFolder = Annotated[
    Path | None,
    Option("--target", metavar="DIR", help="The engine's target.  [default: a calibration pair is written]"),
]
DraftFolder = Annotated[Path | None, Option("--draft", metavar="DIR", help="Its draft.")]
BudgetName = Annotated[str, Option("--budget", metavar="NAME", help="Samples: quick, standard, deep.")]
OnlyCells = Annotated[
    list[str] | None, Option("--only", metavar="CELL", help="Hold these cells alone; repeat it, or use commas.")
]
NumDrafts = Annotated[int, Option("--num-speculative-tokens", metavar="N", help="Most tokens drafted a step.")]
MaxLength = Annotated[int, Option("--max-length", metavar="N", help="Positions that the engine has.")]
MaxBatch = Annotated[int, Option("--max-batch-size", metavar="N", help="Requests side by side.")]
EngineFaultName = Annotated[
    str, Option("--fault", metavar="NAME", help="Plant a known fault in the engine fake, to see a cell fail.")
]
OutFolder = Annotated[
    Path | None,
    Option("--out", metavar="DIR", help="Where the certificate goes.  [default: specverify-out/engine-NAME]"),
]
PairFolder = Annotated[
    Path | None, Option("--write-pair", metavar="DIR", help="Write a calibration pair for a server of yours, and stop.")
]
ShapeName = Annotated[
    str | None,
    Option(
        "--shape",
        metavar="NAME",
        help="How it is called: specverify, transformers, vllm, flashinfer, plain, plain-batch.  [default: its parameters say]",
    ),
]
Seed = Annotated[
    int | None,
    Option(
        metavar="S", min=0, help="Of the examples, and of what is sampled.  [default: 0 of a rule, 17 of an engine]"
    ),
]


def qualify(
    engine: EngineName = None,
    *,
    rule: Rule = None,
    shape: ShapeName = None,
    target: TargetFolder = None,
    draft: DraftFolder = None,
    url: Url = "",
    model: Model = "",
    serve: Serve = "",
    option: EngineOption = None,
    off: OffEngine = "",
    budget: BudgetName = "standard",
    only: OnlyCells = None,
    num_speculative_tokens: NumDrafts = 3,
    max_length: MaxLength = 256,
    max_batch_size: MaxBatch = 16,
    fault: EngineFaultName = "",
    seed: Seed = None,
    out: OutFolder = None,
    pair_folder: PairFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Say whether speculation in ENGINE is sound, or with --rule whether a verification function is lossless.

    An engine runs a calibration pair whose exact law is known, without speculation first; each cell of claims passes, fails
    with its evidence, or says why it could not be held. A function runs as it is, its random numbers replaced by every
    outcome that they can have: no sampling.
    """
    if pair_folder is not None:
        return write_pair(pair_folder)
    if rule is not None and engine is not None:
        msg = f"give either the engine {engine} or --rule {rule}, not both"
        raise UsageError(msg)
    if rule is not None:
        return _qualify_rule(rule, shape=shape, seed=seed or 0, as_json=as_json, quiet=quiet)
    if engine is None:
        msg = "name an engine, such as transformers, or a verification function with --rule module:function"
        raise UsageError(msg)
    named = tuple(name.strip() for given in only or () for name in given.split(","))
    command = EngineCommand(
        engine=engine, target=target, draft=draft, url=url, model=model, serve=serve, options=tuple(option or ()), off=off,
        budget=budget, only=named, seed=seed, num_speculative_tokens=num_speculative_tokens, max_length=max_length,
        max_batch_size=max_batch_size, fault=fault, out=out,
    )  # fmt: skip
    return qualify_engine(command, as_json=as_json, quiet=quiet)


def _qualify_rule(rule: str, *, shape: str | None, seed: int, as_json: bool, quiet: bool) -> int:
    from specverify.qualify import load_rule
    from specverify.qualify import qualify as qualified

    function = load_rule(rule)
    with crash_kept_in(Path(tempfile.gettempdir())):
        found = qualified(function, name=rule, shape=shape, seed=seed)
        words = ["specverify", "qualify", "--rule", rule, *(["--shape", shape] if shape else []), "--seed", str(seed)]
        if as_json:
            typer.echo(json.dumps(_object(found, shlex.join(words)), indent=2))
        elif quiet:
            typer.echo(f"{found.verdict}  {clean(_headline(found))}")
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
    from specverify.report.text import LABELS, MARKS

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
        console.print(Text(clean(failure(found.blamed, reproduce=reproduce), lines=True)), soft_wrap=True)
        others = [each.id for each in found.claims if each.verdict == "FAIL" and each is not found.blamed]
        if others:
            console.print(Text(f"Fail too, likely for the same reason: {', '.join(others)}"))
    console.print()
    console.print(Text(f"{MARKS[found.verdict]} {LABELS[found.verdict]}  {clean(_headline(found))}"))
