"""What is different from the last certificate of the pair: verdicts, figures, files, plan and environment, as rows to print."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from specverify.report.text import LABELS, NONE, clean, measurement, number, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.records import Certificate, ModelFingerprint

__all__ = ["Change", "changes", "comparable"]

_FIGURES = (
    ("acceptance", "expected_acceptance"),
    ("acceptance", "mean_acceptance_length"),
    ("cost", "measured_speedup"),
    ("cost", "predicted_speedup"),
    ("cost", "peak_memory_bytes"),
    ("greedy", "num_tolerated_flips"),
    ("lossless", "kolmogorov_distance_bound"),
)
"""Figures that one looks at from run to run; an interval is printed where the check has one."""
_MOST_FILES = 20


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that was one way and is another."""

    what: str
    before: str
    now: str


def comparable(last: Certificate | None, certificate: Certificate) -> bool:
    """Whether they are about the same pair by name, and neither is a demonstration."""
    if last is None or last.fault or certificate.fault:
        return False
    drafts = [each.draft.name if each.draft is not None else None for each in (last, certificate)]
    return last.target.name == certificate.target.name and drafts[0] == drafts[1]


def changes(last: Certificate, certificate: Certificate) -> list[Change]:
    """In the order in which one wants to know."""
    return [each for each in _all(last, certificate) if each.before != each.now]


def _all(last: Certificate, certificate: Certificate) -> Iterator[Change]:
    yield Change(what="verdict", before=LABELS[last.verdict], now=LABELS[certificate.verdict])
    before, now = _by_id(last), _by_id(certificate)
    for name in dict.fromkeys((*now, *before)):
        yield Change(what=f"{clean(name)}: verdict", before=before.get(name, NONE), now=now.get(name, NONE))
    for check_id, key in _FIGURES:
        yield Change(what=key, before=_figure(last, check_id, key), now=_figure(certificate, check_id, key))
    for role in ("target", "draft"):
        yield from _files(role, getattr(last, role), getattr(certificate, role))
    for each in fields(certificate.environment):
        yield Change(
            what=each.name,
            before=clean(str(getattr(last.environment, each.name))),
            now=clean(str(getattr(certificate.environment, each.name))),
        )
    was, is_now = dict(settings(last.plan)), dict(settings(certificate.plan))
    for key in dict.fromkeys((*is_now, *was)):
        yield Change(what=f"plan: {clean(key)}", before=clean(was.get(key, NONE)), now=clean(is_now.get(key, NONE)))
    yield Change(what="prompts", before=last.prompts_sha256[:12], now=certificate.prompts_sha256[:12])


def _by_id(certificate: Certificate) -> dict[str, str]:
    return {result.id: LABELS[result.verdict] for result in certificate.checks}


def _figure(certificate: Certificate, check_id: str, key: str) -> str:
    found = next((result.measurements for result in certificate.checks if result.id == check_id), {})
    if key not in found:
        return NONE
    low, high = found.get(f"{key}_low"), found.get(f"{key}_high")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return f"{measurement(key, found[key])} [{number(low)}, {number(high)}]"
    return measurement(key, found[key])


def _files(role: str, before: ModelFingerprint | None, now: ModelFingerprint | None) -> Iterator[Change]:
    was, are = (each.files if each is not None else {} for each in (before, now))
    differing = [name for name in sorted({*was, *are}) if was.get(name) != are.get(name)]
    for name in differing[:_MOST_FILES]:
        yield Change(what=f"{role}/{clean(name)}", before=was.get(name, NONE)[:12], now=are.get(name, NONE)[:12])
    if len(differing) > _MOST_FILES:
        yield Change(what=f"{role}: more files", before=NONE, now=f"{len(differing) - _MOST_FILES:,} differ")
