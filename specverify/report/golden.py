"""A golden's report as text: the verdict, the first cause, and a line a layer with its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.golden.records import Change
from specverify.records import Verdict
from specverify.report.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.golden.records import GoldenReport, LayerVerdict

__all__ = ["render_golden"]

_WIDTH = 11
_MOST_FINDINGS = 8


def render_golden(report: GoldenReport, *, record_command: str) -> str:
    """The whole report; `record_command` is what records what is missing."""
    return "\n".join(map(clean, _lines(report, record_command)))


def _lines(report: GoldenReport, record_command: str) -> Iterator[str]:
    last = report.recorded[-1]
    yield f"{report.verdict}  golden {report.name}: {report.headline}"
    yield f"  recorded {last.created} because {last.reason!r}, with torch {last.environment.torch}, transformers {last.environment.transformers}"
    yield from (f"  note: {note}" for note in report.notes)
    yield ""
    for layer in report.layers:
        yield f"  {layer.layer:<{_WIDTH}}{_said(layer):<14}{layer.summary}"
        yield from _evidence(layer)
    if report.missing:
        yield ""
        yield f"  no golden yet for {', '.join(report.missing)}; record: {record_command}"
    if report.unused:
        yield ""
        yield f"  unused: {', '.join(report.unused)} is asked for no more; record again: {record_command} --update"
    elif report.causes:
        yield ""
        yield f"  if that was meant, record again: {record_command} --update"


def _said(layer: LayerVerdict) -> str:
    return "CHANGED" if layer.change is Change.CAUSE else layer.change.value


def _evidence(layer: LayerVerdict) -> Iterator[str]:
    shown = layer.findings if layer.change is Change.CAUSE else layer.findings[:2]
    indent = " " * (_WIDTH + 4)
    for finding in shown[:_MOST_FINDINGS]:
        note = "note: " if finding.severity is Verdict.PASS else ""
        yield f"{indent}{note}{finding.text}{f'  ({finding.place})' if finding.place else ''}"
    if layer.advice:
        yield f"{indent}→ {layer.advice}"
