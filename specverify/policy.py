"""What a certificate must show before a pair is let out: one frozen record, read from TOML by `policy_file`."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the codec resolves the annotations at run time
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = ["DomainPolicy", "Policy"]


@dataclass(frozen=True, kw_only=True)
class DomainPolicy:
    """What is wanted of one domain of the prompts."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}

    minimum_acceptance: float = 0.0
    """Expected acceptance Σ min(p, q) in this domain: the estimate."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is wanted of a certificate. A figure with an interval is held at the interval's worse end."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}

    required_checks: tuple[str, ...] = ("greedy", "lossless")
    """Checks that must have ended in PASS."""
    tolerated_inconclusive: tuple[str, ...] = ()
    """Checks that may be INCONCLUSIVE, such as cost where machines are noisy; a FAIL is never tolerated."""
    maximum_age_days: float | None = None
    """Days after which a pair must be certified again."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Releases with which it was certified, as pip writes them: specverify, python, torch, transformers."""
    devices: tuple[str, ...] = ()
    """What the device's name may begin with, such as cuda: NVIDIA H200; empty allows all."""
    dtypes: tuple[str, ...] = ()
    """Number types that it may have been certified in; empty allows all."""
    engines: tuple[str, ...] = ()
    """Engines that may have been under test; empty allows all."""
    minimum_acceptance: float = 0.0
    """Lower end of the interval of expected acceptance Σ min(p, q)."""
    minimum_speedup: float = 0.0
    """Lower end of the interval of the measured speed-up over the target alone."""
    maximum_tolerated_flips: int | None = None
    """Most near ties that may have gone the other way at temperature 0, though within the measured noise."""
    maximum_false_fail_rate: float | None = None
    """The error budget: how often a healthy pair may be failed by chance, in a run."""
    largest_undetected_shift: float | None = None
    """The largest shift of the mean PIT law that the lossless check may have been blind to."""
    minimum_prompts: int = 0
    """Fewest prompts."""
    minimum_samples: Mapping[str, int] = field(default_factory=dict)
    """The sample budget: fewest samples of a check, in the unit that it counts in."""
    allow_remote_code: bool = False
    """Whether code that a model brought along may have been run."""
    domains: Mapping[str, DomainPolicy] = field(default_factory=dict)
    """What is wanted of single domains of the prompts, by their names."""
