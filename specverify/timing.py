"""Times taken in turns: the one way in which anything here is timed.

Note [Timing]: other work comes and goes, so no time is judged by itself. Every figure is a ratio of times taken in turns,
with an interval that resamples whole turns. Each turn has another order, by a fixed seed: whoever always came after a
contender that fills the caches would pay for it.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
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
    names, order = list(contenders), np.random.default_rng(17)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in (names[place] for place in order.permutation(len(names))):
            spent = seconds(device, contenders[name], clock)
            if turn:
                taken[name].append(spent)
    return taken


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
