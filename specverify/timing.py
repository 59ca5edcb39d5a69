"""Times taken in turns: the one way in which anything here is timed.

Note [Timing]: other work comes and goes, so no time is judged by itself. Every figure is a ratio of times taken in turns,
with an interval that resamples whole turns. Each turn begins with another contender, so that none is always first.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Clock = Callable[[], float]

__all__ = ["in_turns", "seconds"]


def seconds(device: torch.device, work: Callable[[], object], clock: Clock) -> float:
    """Wall time of `work`, everything that it queued on the device included, garbage collection left out."""
    gc.disable()
    try:
        _synchronize(device)
        started = clock()
        work()
        _synchronize(device)
        return clock() - started
    finally:
        gc.enable()


def in_turns(
    contenders: Mapping[str, Callable[[], object]], *, device: torch.device, repeats: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each contender in each of `repeats` turns; a turn before them warms up and is thrown away."""
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent = seconds(device, contenders[name], clock)
            if turn:
                taken[name].append(spent)
    return taken


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
