"""Two sides to a comparison. Pure.

Note [A fall]: what is asked is whether acceptance fell by more than is allowed. FAIL if the whole interval of the change lies
below that, PASS if none of it does, and INCONCLUSIVE if the data can't tell. The interval of the whole has the stated
confidence; domains and positions share the same error, Bonferroni's way, so that one of many doesn't fall by chance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from specverify.compare.records import Between, Change, Comparison
from specverify.records import Finding, Verdict
from specverify.statistics.interval import cluster_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from specverify.compare.records import Side

__all__ = ["STRETCH", "compare"]

STRETCH = 8
"""Tokens of a text that are taken together when acceptance is compared by position."""
_CONFIDENCE_OF_SIDES = 0.95
"""Of the intervals that certificates hold."""


def compare(
    old: Side, new: Side, *, allowed_fall: float = 0.01, confidence: float = 0.95, same: bool = False
) -> Comparison:
    """Hold NEW against OLD. `allowed_fall` of acceptance is in [0, 1], and of tokens a step and speed-up a share.

    With `same` they are one certificate: nothing can have changed, however wide its intervals are.
    """
    if same:
        return _with_itself(new, allowed_fall, confidence)
    acceptance = _acceptance(old, new, allowed_fall, confidence)
    domains, positions = _split(old, new, allowed_fall, confidence)
    steps = _figure("tokens a step", old.tokens_per_step, new.tokens_per_step, allowed_fall)
    speed = _speed(old, new, allowed_fall)
    findings = tuple(_findings(old, new, domains, positions))
    verdict = _verdict(acceptance, (*domains, *positions), speed, findings, allowed_fall)
    return Comparison(
        old=old,
        new=new,
        verdict=verdict,
        headline=_headline(verdict, acceptance, domains, speed, findings),
        acceptance=acceptance,
        domains=domains,
        positions=positions,
        tokens_per_step=steps,
        speedup=speed,
        findings=findings,
        allowed_fall=allowed_fall,
        confidence=confidence,
    )


def _with_itself(side: Side, allowed_fall: float, confidence: float) -> Comparison:
    known = side.acceptance.estimate
    acceptance = _change(
        "acceptance", known, known, Between(estimate=0.0, low=0.0, high=0.0), allowed_fall, paired=True
    )
    itself = Finding(text="OLD and NEW are one certificate", severity=Verdict.PASS, place="certificate")
    findings = (itself, *_findings(side, side, (), ()))
    verdict = _verdict(acceptance, (), None, findings, allowed_fall)
    headline = _headline(verdict, acceptance, (), None, findings)
    return Comparison(
        old=side, new=side, verdict=verdict, headline=headline, acceptance=acceptance, domains=(), positions=(),
        tokens_per_step=None, speedup=None, findings=findings, allowed_fall=allowed_fall, confidence=confidence,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ acceptance


def _acceptance(old: Side, new: Side, allowed_fall: float, confidence: float) -> Change:
    shared = old.prompts.keys() & new.prompts.keys()
    if len(shared) >= 2:
        return _paired("acceptance", old, new, sorted(shared), allowed_fall, confidence)
    return _unpaired("acceptance", old.acceptance, new.acceptance, allowed_fall, confidence)


def _split(
    old: Side, new: Side, allowed_fall: float, confidence: float
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """By domain and by position; each of the two families shares one error."""
    shared = sorted(old.prompts.keys() & new.prompts.keys())
    if len(shared) < 2:
        return (
            _unpaired_family(old.domains, new.domains, allowed_fall, confidence),
            _unpaired_family(old.positions, new.positions, allowed_fall, confidence),
        )
    names = sorted({old.prompts[name].domain for name in shared})
    each = 1 - (1 - confidence) / max(1, len(names))
    domains = [
        _paired(domain, old, new, [name for name in shared if old.prompts[name].domain == domain], allowed_fall, each)
        for domain in names
    ]
    return tuple(domains), tuple(_by_position(old, new, shared, allowed_fall, confidence))


def _paired(name: str, old: Side, new: Side, prompts: list[str], allowed_fall: float, confidence: float) -> Change:
    then, now = (np.array([side.prompts[prompt].mean for prompt in prompts]) for side in (old, new))
    return _of_differences(name, then, now, allowed_fall, confidence)


def _by_position(old: Side, new: Side, shared: list[str], allowed_fall: float, confidence: float) -> Iterator[Change]:
    most = max((len(side.prompts[name].by_position) for side in (old, new) for name in shared), default=0)
    for stretch in range(most):
        then, now = (np.array([_at(side.prompts[name].by_position, stretch) for name in shared]) for side in (old, new))
        known = np.isfinite(then) & np.isfinite(now)
        name = f"tokens {stretch * STRETCH} to {(stretch + 1) * STRETCH - 1}"
        if known.sum() >= 2:
            yield _of_differences(name, then[known], now[known], allowed_fall, 1 - (1 - confidence) / most)


def _at(values: tuple[float, ...], place: int) -> float:
    return values[place] if place < len(values) else math.nan


def _of_differences(name: str, old: np.ndarray, new: np.ndarray, allowed_fall: float, confidence: float) -> Change:
    """A paired t interval over prompts, within what a difference of two shares can be."""
    interval = cluster_interval(new - old, np.arange(len(old)), confidence=confidence)
    low, high = (float(np.clip(end, -1, 1)) if math.isfinite(end) else end for end in (interval.low, interval.high))
    between = Between(estimate=interval.estimate, low=low, high=high)
    return _change(name, float(old.mean()), float(new.mean()), between, allowed_fall, paired=True)


def _unpaired_family(
    old: Mapping[str, Between], new: Mapping[str, Between], allowed_fall: float, confidence: float
) -> tuple[Change, ...]:
    shared = [name for name in old if name in new]
    each = 1 - (1 - confidence) / max(1, len(shared))
    return tuple(_unpaired(name, old[name], new[name], allowed_fall, each) for name in shared)


def _unpaired(name: str, old: Between, new: Between, allowed_fall: float, confidence: float) -> Change:
    """Two intervals as if of two prompt sets: their half widths add in square. Wider than a paired one, never too narrow."""
    wider = float(stats.norm.ppf((1 + confidence) / 2) / stats.norm.ppf((1 + _CONFIDENCE_OF_SIDES) / 2))
    half = wider * math.hypot(_half(old), _half(new))
    difference = new.estimate - old.estimate
    between = Between(estimate=difference, low=difference - half, high=difference + half)
    return _change(name, old.estimate, new.estimate, between, allowed_fall, paired=False)


def _half(between: Between) -> float:
    return max(between.high - between.estimate, between.estimate - between.low)


def _change(name: str, old: float, new: float, between: Between, allowed_fall: float, *, paired: bool) -> Change:
    return Change(name=name, old=old, new=new, difference=between, paired=paired, fell=between.high < -allowed_fall)


# ------------------------------------------------------------------------------------------------ speed


def _figure(name: str, old: float, new: float, allowed_fall: float) -> Change | None:
    """A figure without an interval."""
    if not math.isfinite(old) or not math.isfinite(new):
        return None
    unknown = Between(estimate=new - old, low=-math.inf, high=math.inf)
    return _change(name, old, new, unknown, allowed_fall, paired=False)


def _speed(old: Side, new: Side, allowed_fall: float) -> Change | None:
    if old.speedup is None or new.speedup is None:
        return None
    return _unpaired("speed-up", old.speedup, new.speedup, allowed_fall * old.speedup.estimate, _CONFIDENCE_OF_SIDES)


# ------------------------------------------------------------------------------------------------ what to make of it


def _findings(old: Side, new: Side, domains: tuple[Change, ...], positions: tuple[Change, ...]) -> Iterator[Finding]:
    if old.target_sha256 != new.target_sha256:
        yield Finding(
            text="the targets have other weights, so what is said may change: run specverify golden check, and certify NEW",
            severity=Verdict.INCONCLUSIVE,
            place="target",
        )
    if old.tokenizer_sha256 != new.tokenizer_sha256:
        yield Finding(
            text="the tokenizers differ, so rates a token are rates of other tokens: compare speed in characters, too",
            severity=Verdict.INCONCLUSIVE,
            place="tokenizer",
        )
    same_draft = old.draft_sha256 == new.draft_sha256
    yield Finding(text=f"{'the same draft' if same_draft else 'another draft'}", severity=Verdict.PASS, place="draft")
    if new.kind != "certificate":
        yield Finding(
            text="NEW has no certificate here: a comparison says nothing of correctness; run specverify certify",
            severity=Verdict.PASS,
            place="certificate",
        )
    elif new.verdict is not Verdict.PASS:
        yield Finding(text=f"the certificate of NEW says {new.verdict}", severity=new.verdict, place="certificate")
    for change in (*domains, *positions):
        if change.fell:
            text = f"acceptance fell from {change.old:.3f} to {change.new:.3f}"
            yield Finding(text=f"{text} {_interval(change.difference)}", place=change.name)


def _verdict(
    acceptance: Change, parts: Iterable[Change], speed: Change | None, findings: tuple[Finding, ...], allowed: float
) -> Verdict:
    figures = [acceptance] + ([speed] if speed is not None else [])
    if any(each.fell for each in (*figures, *parts)) or any(
        found.severity is Verdict.FAIL for found in findings if found.place == "certificate"
    ):
        return Verdict.FAIL
    unsure = not acceptance.difference.low >= -allowed
    weakened = any(found.severity in (Verdict.INCONCLUSIVE, Verdict.NOT_RUN) for found in findings)
    return Verdict.INCONCLUSIVE if unsure or weakened else Verdict.PASS


def _headline(
    verdict: Verdict,
    acceptance: Change,
    domains: tuple[Change, ...],
    speed: Change | None,
    findings: tuple[Finding, ...],
) -> str:
    moved = f"acceptance {acceptance.old:.3f} to {acceptance.new:.3f}, change {acceptance.difference.estimate:+.3f} {_interval(acceptance.difference)}"
    if acceptance.fell:
        return f"acceptance fell: {moved}"
    fallen = [each.name for each in domains if each.fell]
    if fallen:
        return f"acceptance fell in {', '.join(fallen)}; in all {moved}"
    if speed is not None and speed.fell:
        return f"the speed-up fell from {speed.old:.2f}x to {speed.new:.2f}x; {moved}"
    if verdict is Verdict.PASS:
        return f"no fall beyond what is allowed: {moved}"
    reasons = [found.text.partition(":")[0] for found in findings if found.severity is not Verdict.PASS]
    return f"{'; '.join(reasons) or 'too few prompts to exclude a fall'}; {moved}"


def _interval(between: Between) -> str:
    return f"[{between.low:+.3f}, {between.high:+.3f}]"
