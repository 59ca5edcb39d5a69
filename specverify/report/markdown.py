"""A certificate as Markdown for a pull request: verdict, claims, and what failed, always short enough to be posted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from specverify.records import Verdict
from specverify.report import text
from specverify.report.changes import changes, comparable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.records import Certificate, CheckResult

__all__ = ["MOST_CHARACTERS", "render_markdown"]

MOST_CHARACTERS = 65_000
"""GitHub refuses a comment of 65,536; what is left over is for whoever posts it."""
_MOST_FINDINGS = 10
_MOST_CHANGES = 40
_MOST_IN_LINE = 400
_MOST_IN_TABLE = 25_000
_MOST_IN_BLOCK = 12_000
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])|^(?=[-+](?!\d)|[#>=]|\d+[.)](?:\s|$))")
"""What begins markup anywhere, and what begins a list, a heading or a quote at the start of a line."""
_SIGNS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "⚠️", Verdict.NOT_RUN: "⏭️"}


def render_markdown(certificate: Certificate, last: Certificate | None = None) -> str:
    """The summary, shorter than `MOST_CHARACTERS` whatever the certificate holds; what was left out is counted."""
    parts = ["\n".join(_head(certificate)), "\n".join(_claims(certificate))]
    if last is not None and comparable(last, certificate):
        parts.append("\n".join(_changes(last, certificate)))
    broken = [result for result in certificate.checks if result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)]
    room = MOST_CHARACTERS - len("\n\n".join(parts)) - len(tail := _tail(certificate)) - 200
    for position, result in enumerate(broken):
        block = "\n".join(_block(result, seed=certificate.seed))
        if len(block) + 2 > room:
            parts.append(f"{len(broken) - position} more checks that did not pass are in the certificate.")
            break
        parts.append(block)
        room -= len(block) + 2
    return "\n\n".join([*parts, tail]) + "\n"


def escape(content: str, *, most: int = _MOST_IN_LINE) -> str:
    """One line that renders as it reads: no markup, no table cell's end, no HTML, nobody and no issue mentioned."""
    line = text.at_most(content, most)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(lambda found: f"\\{found[1]}" if found[1] else "\u2060", line)
    return re.sub(r"([@#])(?=\w)", "\\1\u2060", line)


def _head(certificate: Certificate) -> Iterator[str]:
    label = text.LABELS[certificate.verdict]
    yield f"## {_SIGNS[certificate.verdict]} {label}: {escape(text.versus(certificate), most=200)}"
    if certificate.fault:
        yield f"\n> [!CAUTION]\n> {escape(text.planted(certificate))}"
    yield f"\n**{escape(certificate.headline)}**"


def _claims(certificate: Certificate) -> Iterator[str]:
    yield "| Check | Verdict | What was seen | Samples | Smallest detectable |"
    yield "|---|---|---|---|---|"
    written = 0
    for position, result in enumerate(certificate.checks):
        cells = (
            escape(result.id, most=60),
            f"{_SIGNS[result.verdict]} {text.LABELS[result.verdict]}",
            escape(result.summary, most=240),
            escape(text.samples(result), most=40),
            escape(text.detectable(result), most=80),
        )
        row = f"| {' | '.join(cells)} |"
        written += len(row)
        if written > _MOST_IN_TABLE:
            yield f"\n{len(certificate.checks) - position:,} more checks are in the certificate."
            return
        yield row


def _changes(last: Certificate, certificate: Certificate) -> Iterator[str]:
    found = changes(last, certificate)
    made = escape(last.created, most=40)
    if not found:
        yield f"Nothing is different from the certificate of {made}, as far as it is compared."
        return
    yield f"<details><summary>{len(found)} differences from the certificate of {made}</summary>\n"
    yield "| What | Before | Now |"
    yield "|---|---|---|"
    for each in found[:_MOST_CHANGES]:
        yield f"| {' | '.join(escape(cell, most=80) for cell in (each.what, each.before, each.now))} |"
    if len(found) > _MOST_CHANGES:
        yield f"\n{len(found) - _MOST_CHANGES:,} more are in the report."
    yield "\n</details>"


def _block(result: CheckResult, *, seed: int) -> Iterator[str]:
    opened = " open" if result.verdict is Verdict.FAIL else ""
    name = text.at_most(result.id, 60).replace("&", "&amp;").replace("<", "&lt;")
    yield f"<details{opened}><summary>{_SIGNS[result.verdict]} <b>{name}</b></summary>\n"
    yield f"{escape(result.summary)}\n"
    rows = text.failure_rows(result, seed=seed, most_findings=_MOST_FINDINGS)
    written = 0
    for position, (label, line) in enumerate(rows):
        item = f"- {f'**{label}**: ' if label else ''}{escape(line)}"
        written += len(item)
        if written > _MOST_IN_BLOCK:
            yield f"- and {len(rows) - position} more lines in the certificate"
            break
        yield item
    if result.reproduce:
        yield f"\n{_fenced(result.reproduce)}"
    yield "\n</details>"


def _fenced(command: str) -> str:
    content = text.clean(command, most=4_000)
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}shell\n{content}\n{fence}"


def _tail(certificate: Certificate) -> str:
    environment = certificate.environment
    made = (
        f"{certificate.engine} on {environment.device}, {environment.dtype}, seed {certificate.seed}, "
        f"{text.duration(certificate.elapsed_s)}, specverify {environment.specverify}"
    )
    return f"<sub>{escape(made)}; plan {escape(certificate.plan_sha256[:12])}</sub>"
