"""The nouns of a comparison. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the codec resolves the annotations at run time
from dataclasses import dataclass, field

from specverify.records import Finding, Verdict

__all__ = ["Between", "Change", "Comparison", "PromptAcceptance", "Side"]


@dataclass(frozen=True, kw_only=True)
class Between:
    """An estimate, and the interval around it; infinite ends say that the data can't bound it."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class PromptAcceptance:
    """Mean Σ min(p, q) after one prompt."""

    domain: str
    mean: float
    by_position: tuple[float, ...] = ()
    """Of each stretch of `STRETCH` tokens; NaN where the text was over."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: what is known of it."""

    name: str
    kind: str
    """certificate, pair or golden."""
    verdict: Verdict = Verdict.NOT_RUN
    """Of a certificate."""
    target_sha256: str
    tokenizer_sha256: str
    draft_sha256: str
    acceptance: Between
    prompts: Mapping[str, PromptAcceptance] = field(default_factory=dict)
    """Prompt id to its acceptance; empty of a certificate, which keeps domains alone."""
    domains: Mapping[str, Between] = field(default_factory=dict)
    positions: Mapping[str, Between] = field(default_factory=dict)
    tokens_per_step: float = float("nan")
    speedup: Between | None = None
    """Measured, or predicted from measured passes."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    """Other figures that a rollout asks for: memory, best number of speculative tokens."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure on both sides."""

    name: str
    old: float
    new: float
    difference: Between
    paired: bool
    """Prompt by prompt, so that the prompts' own spread cancels."""
    fell: bool
    """By more than is allowed, beyond the interval."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """OLD against NEW."""

    old: Side
    new: Side
    verdict: Verdict
    headline: str
    acceptance: Change
    domains: tuple[Change, ...] = ()
    positions: tuple[Change, ...] = ()
    tokens_per_step: Change | None = None
    speedup: Change | None = None
    findings: tuple[Finding, ...] = ()
    """What a rollout decision needs beside the figures: same target, same tokenizer, certified or not."""
    allowed_fall: float
    confidence: float
