"""`specverify rank` says which draft, and how many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.invocation import Invocation

if TYPE_CHECKING:
    from specverify.rank import Ranking

__all__ = ["rank"]

Drafts = Annotated[
    list[str] | None, typer.Argument(metavar="DRAFT...", help="Folders or hub names of drafts.", show_default=False)
]
Most = Annotated[
    int, typer.Option("--num-speculative-tokens", metavar="N", min=1, max=64, help="Most tokens drafted a step.")
]
Batches = Annotated[str, typer.Option("--batch", metavar="N,N,…", help="Batch sizes to time passes at.")]
Folder = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where rank.json and pareto.svg go.")]


def rank(
    target: options.Target = None,
    drafts: Drafts = None,
    *,
    most: Most = 16,
    batch: Batches = "1,8,32",
    prompts: options.Prompts = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = None,
    out: Folder = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Say which of the DRAFTs goes with TARGET and with how many speculative tokens, and when speculation is a loss.

    From measured acceptance, passes and memory; without arguments, of the embedded drafts. Ends with 1 where speculation
    is a loss with each of them.
    """
    from specverify.codec import dump, write_text_atomically
    from specverify.rank import pareto_plot, sentence
    from specverify.report.rank import ranking_table

    batches = _batches(batch)
    invocations = _invocations(target, drafts, prompts=prompts, device=device, dtype=dtype, seed=seed, most=most,
                               trust_remote_code=trust_remote_code)  # fmt: skip
    ranking = _ranked(invocations, batches, silent=quiet or as_json)
    if out is not None:
        from specverify.report.plots import svg

        write_text_atomically(out / "pareto.svg", svg(pareto_plot(ranking)))
        write_text_atomically(out / "rank.json", dump(ranking))
    if as_json:
        typer.echo(dump(ranking), nl=False)
    elif quiet:
        typer.echo(sentence(ranking))
    else:
        typer.echo(f"{ranking_table(ranking)}\n\n{sentence(ranking)}")
    return 1 if ranking.loss else 0


def _batches(given: str) -> tuple[int, ...]:
    from specverify.errors import PlanError

    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 4096 for part in parts):
        msg = f"--batch '{given}' are no batch sizes; give numbers from 1 to 4096, such as 1,8,32"
        raise PlanError(msg)
    return tuple(map(int, parts))


def _invocations(
    target: str | None, drafts: list[str] | None, *, most: int, trust_remote_code: bool, **same: object
) -> dict[str, Invocation]:
    """One a draft, by its name."""
    from specverify.errors import UsageError
    from specverify.pairs import embedded_pairs
    from specverify.report.text import clean

    given = {"num_speculative_tokens": most, "trust_remote_code": trust_remote_code, **same}
    if target is None:
        return {name: Invocation(pair=name, **given) for name in embedded_pairs()}  # type: ignore[arg-type]  # options
    if not drafts:
        msg = f"{target} needs at least one DRAFT after it"
        raise UsageError(msg)
    names = [clean(Path(draft).name) for draft in drafts]
    short = len(set(names)) == len(names)
    return {
        name if short else clean(draft): Invocation(target=target, draft=draft, **given)  # type: ignore[arg-type]  # options
        for name, draft in zip(names, drafts, strict=True)
    }


def _ranked(invocations: dict[str, Invocation], batches: tuple[int, ...], *, silent: bool) -> Ranking:
    from functools import partial

    from rich.console import Console

    from specverify.cli.progress import watching
    from specverify.cli.setup import make_subject
    from specverify.rank import rank as ranked

    plan = next(iter(invocations.values())).plan()
    watch = watching(Console(stderr=True), quiet=silent, as_json=silent)
    try:
        subjects = [partial(make_subject, each, each.sources(), plan) for each in invocations.values()]
        return ranked(subjects, list(invocations), plan, batches=batches, watch=watch)
    finally:
        watch.close()
