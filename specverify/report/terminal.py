"""A certificate in the terminal: the claims, what failed and why, the verdict. Reads without colour, at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specverify.records import Verdict
from specverify.report import text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from specverify.records import Certificate, CheckResult

__all__ = ["print_certificate", "print_result"]

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow", Verdict.NOT_RUN: "dim"}
_MOST_FINDINGS = 5
_MOST_CHARACTERS = 600


def print_certificate(certificate: Certificate, console: Console, *, path: str | Path | None = None) -> None:
    """Print the run's truth, its claims, each failure, and the verdict last, where the eye rests."""
    console.print(Text(f"{text.versus(certificate)} on {text.clean(certificate.engine)}", style="bold"))
    console.print(Text(_truth(certificate), style="dim"))
    console.print()
    console.print(_claims(certificate, console))
    for result in certificate.checks:
        if result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
            console.print()
            print_result(result, console, seed=certificate.seed)
    console.print()
    console.print(_verdict(certificate, console))
    if certificate.fault:
        console.print(Text(text.planted(certificate), style="bold reverse yellow"))
    if path is not None:
        console.print(Text(f"certificate: {path}"), soft_wrap=True)


def print_result(result: CheckResult, console: Console, *, seed: int | None = None) -> None:
    """Print one check as STYLE.md's "How a failure reads" has it."""
    head = Text.assemble(
        (f"{_said(result.verdict, console)} ", _STYLES[result.verdict]),
        (text.clean(result.id), "bold"),
        f": {text.clean(result.summary, most=_MOST_CHARACTERS)}",
    )
    console.print(head)
    console.print()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, line in text.failure_rows(result, seed=seed, most_findings=_MOST_FINDINGS):
        grid.add_row(Text(label), Text(text.clean(line, most=_MOST_CHARACTERS)))
    console.print(Padding(grid, (0, 0, 0, 2)))
    if result.reproduce:
        console.print()
        console.print(Text(f"Reproduce: {text.clean(result.reproduce)}"), soft_wrap=True)


def _truth(certificate: Certificate) -> str:
    environment = certificate.environment
    return (
        f"{environment.device}, {environment.dtype}, seed {certificate.seed}, {text.duration(certificate.elapsed_s)}, "
        f"specverify {environment.specverify}, torch {environment.torch}, transformers {environment.transformers}"
    )


def _claims(certificate: Certificate, console: Console) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=False, header_style="dim")
    table.add_column("check", overflow="fold", max_width=24)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen", overflow="fold", ratio=1)
    for result in certificate.checks:
        verdict = Text(_said(result.verdict, console), style=_STYLES[result.verdict])
        table.add_row(Text(text.clean(result.id)), verdict, Text(text.at_most(result.summary, 240)))
    return table


def _said(verdict: Verdict, console: Console) -> str:
    """The verdict's sign and word; the word alone where the terminal can't show the sign."""
    sign = text.MARKS[verdict] if console.encoding.lower().startswith("utf") else ""
    return f"{sign} {text.LABELS[verdict]}".strip()


def _verdict(certificate: Certificate, console: Console) -> Text:
    return Text.assemble(
        (_said(certificate.verdict, console), _STYLES[certificate.verdict]),
        f"  {text.clean(certificate.headline, most=_MOST_CHARACTERS)}",
    )
