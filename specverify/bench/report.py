"""What a benchmark found: raw times of turns, the machine that they were taken on, and what two such records show."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the codec resolves the annotations at run time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specverify.records import SCHEMA_VERSION, Environment, Verdict
from specverify.statistics.interval import Interval, paired_ratio_interval

__all__ = ["BenchReport", "Change", "Comparison", "compared", "comparisons_of"]

_SEED = 17
"""Of the bootstrap: the same times give the same interval."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender against a baseline, both timed in each of some turns on the same work."""

    id: str
    """What is done, such as `verification/V=50257,g=5,B=8,float32`."""
    name: str
    """Of the contender."""
    baseline: str
    raw_s: tuple[float, ...]
    baseline_s: tuple[float, ...]
    units: float
    """How much is done in a turn."""
    unit: str
    num_bytes: float = 0.0
    """That the contender must read in a turn; 0 where that says nothing."""

    @cached_property
    def ratio(self) -> Interval:
        """Baseline time over the contender's, of the medians: above 1, the contender is faster."""
        return paired_ratio_interval(np.array(self.baseline_s), np.array(self.raw_s), seed=_SEED, of="median")

    @property
    def units_per_s(self) -> float:
        """At the median turn."""
        return self.units / float(np.median(self.raw_s))

    @property
    def gigabytes_per_s(self) -> float:
        """At the median turn."""
        return self.num_bytes / float(np.median(self.raw_s)) / 1e9


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything that one run measured."""

    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    environment: Environment
    load_per_core: float
    """Processes that wanted a core over cores, when the run began; above 1, times say more about others."""
    clock: str = "wall"
    """`cpu` where only the time of this process was counted: steadier where others use the cores, and blind to waits."""
    comparisons: tuple[Comparison, ...]
    measurements: Mapping[str, float | int | str] = field(default_factory=dict)
    """Of the pair: passes, acceptance, speed-ups, memory."""
    not_run: tuple[str, ...] = ()
    """Peers that were left out, and why."""


def comparisons_of(
    taken: Mapping[str, list[float]],
    *,
    of: str,
    baseline: str,
    units: float,
    unit: str,
    num_bytes: Mapping[str, float] | None = None,
) -> tuple[Comparison, ...]:
    """One comparison a contender, from the times of the same turns."""
    return tuple(
        Comparison(
            id=of,
            name=name,
            baseline=baseline,
            raw_s=tuple(times),
            baseline_s=tuple(taken[baseline]),
            units=units,
            unit=unit,
            num_bytes=(num_bytes or {}).get(name, 0.0),
        )
        for name, times in taken.items()
        if name != baseline
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """One comparison in an old and in a new record."""

    id: str
    name: str
    verdict: Verdict
    """FAIL where the new ratio lies below the old one, intervals apart."""
    text: str


def compared(old: BenchReport, new: BenchReport) -> tuple[Change, ...]:
    """Each contender's ratio to its own baseline, old against new; INCONCLUSIVE where the machines or clocks differ."""
    before = {(each.id, each.name, each.baseline): each for each in old.comparisons}
    places = [
        (each.environment.cpu, each.environment.device, each.environment.num_threads, each.clock) for each in (old, new)
    ]
    changes = []
    for each in new.comparisons:
        other = before.get((each.id, each.name, each.baseline))
        if other is None:
            continue
        now, then = each.ratio, other.ratio
        text = (
            f"{now.estimate:.2f}x of {each.baseline} [{now.low:.2f}, {now.high:.2f}], "
            f"was {then.estimate:.2f}x [{then.low:.2f}, {then.high:.2f}]"
        )
        if places[0] != places[1]:
            verdict, text = (
                Verdict.INCONCLUSIVE,
                f"another machine or clock ({places[0]} then, {places[1]} now): {text}",
            )
        elif not np.isfinite((now.low, then.low)).all():
            verdict = Verdict.INCONCLUSIVE
        else:
            verdict = Verdict.FAIL if now.high < then.low else Verdict.PASS
        changes.append(Change(id=each.id, name=each.name, verdict=verdict, text=text))
    return tuple(changes)
