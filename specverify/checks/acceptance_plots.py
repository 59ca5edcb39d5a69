"""Pictures of acceptance: by position, by place in a block, by domain, and what it means for tokens a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from specverify.records import Plot, PlotKind, Series
from specverify.statistics.interval import Interval, cluster_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from specverify.checks.counters import Tested
    from specverify.scoring import ScoredTraces

__all__ = ["by_domain", "domain_plot", "per_step_plot", "place_plot", "position_plot"]


def _grouped(
    values: NDArray[np.float64], keys: NDArray[np.int64] | NDArray[np.str_], prompts: NDArray[np.int64]
) -> dict[float | str, Interval]:
    """Mean and interval of the values of each key."""
    return {key: cluster_interval(values[keys == key], prompts[keys == key]) for key in np.unique(keys).tolist()}


def by_domain(scored: ScoredTraces) -> dict[float | str, Interval]:
    """Σ min(p, q) of each domain, with an interval clustered by prompt."""
    names, numbers = scored.domains()
    return {names[int(key)]: each for key, each in _grouped(scored["overlap"], numbers, scored.prompts()).items()}


def _series(label: str, x: Iterable[float | str], intervals: Iterable[Interval], *, highest: float = 1.0) -> Series:
    """Intervals as a series; rates end at 0 and 1 where the data can't bound them."""
    each = tuple(intervals)
    return Series(
        label=label,
        x=tuple(x),
        y=tuple(interval.estimate for interval in each),
        low=tuple(max(0.0, interval.low) for interval in each),
        high=tuple(min(highest, interval.high) for interval in each),
    )


def position_plot(scored: ScoredTraces) -> Plot:
    """Expected acceptance by position after the prompt."""
    intervals = _grouped(scored["overlap"], scored["position"].astype(np.int64), scored.prompts())
    return Plot(
        id="acceptance/position",
        title="Acceptance by position",
        x_label="token after the prompt",
        y_label="expected acceptance",
        kind=PlotKind.LINE,
        series=(_series("Σ min(p, q), 95 % interval by prompt", intervals, intervals.values()),),
        caption="Where it falls, drafts are wasted; it says nothing about correctness.",
    )


def place_plot(scored: ScoredTraces, tested: Tested) -> Plot:
    """Expected and measured at each place of a block, of the drafts that were tested there."""
    prompts, overlap = scored.prompts()[tested.rows], scored["overlap"][tested.rows]
    measured = _grouped(tested.accepted.astype(np.float64), tested.places, prompts)
    expected = _grouped(overlap, tested.places, prompts)
    names = [f"draft {int(place) + 1}" for place in measured]
    return Plot(
        id="acceptance/place",
        title="Acceptance by place in the block, of the drafts tested there",
        x_label="place in the block",
        y_label="acceptance",
        kind=PlotKind.BAR,
        series=(
            _series("measured: accepted / tested", names, measured.values()),
            _series("expected: Σ min(p, q)", names, expected.values()),
        ),
        caption="The two agree, place by place, if the rule is lossless and the draft sees what it should.",
    )


def domain_plot(scored: ScoredTraces) -> Plot:
    """Expected acceptance by domain."""
    intervals = by_domain(scored)
    return Plot(
        id="acceptance/domain",
        title="Acceptance by domain",
        x_label="domain",
        y_label="expected acceptance",
        kind=PlotKind.BAR,
        series=(_series("Σ min(p, q), 95 % interval by prompt", intervals, intervals.values()),),
        caption="Where it is low, speculation gains least; it says nothing about correctness.",
    )


def per_step_plot(per_step: Mapping[int, Interval]) -> Plot:
    """Predicted tokens a step by number of speculative tokens."""
    return Plot(
        id="acceptance/tokens_per_step",
        title="Tokens a step against number of speculative tokens",
        x_label="speculative tokens",
        y_label="tokens a step",
        kind=PlotKind.LINE,
        series=(
            _series("predicted, 95 % interval by prompt", map(float, per_step), per_step.values(), highest=math.inf),
        ),
        caption="Where the line flattens, further drafts are mostly thrown away.",
    )
