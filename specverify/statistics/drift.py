"""Has acceptance fallen? An alarm for a stream of prompts that never ends, with a stated time between false alarms.

Note [e-detector]: a fixed test that is repeated every hour raises false alarms without limit. The e-detector restarts a
bet at every prompt and adds them all up: S_k = (S_{k-1} + 1) (1 + λ (μ0 - α_k)), averaged over a few λ. While the mean
acceptance is at least μ0 the expectation of S_k is at most k, so the mean number of prompts until the average reaches A
is at least A, whatever the law of the acceptance is [ShinRamdasRinaldo2024]. There is nothing to calibrate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import InternalError

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["DriftAlarm", "DriftDetector", "acceptance_drift"]

_BETS = (0.25, 0.5, 1.0, 1.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class DriftAlarm:
    """What a detector has seen."""

    path: Float[np.ndarray, " prompts"]
    """The evidence for a fall that goes on, after each prompt: an alarm from `run_length` on."""
    run_length: float
    """Prompts that pass on average between two false alarms, at least."""
    first_alarm: int | None
    """Index of the first prompt with an alarm."""


class DriftDetector:
    """The same, one observation at a time: for a stream."""

    def __init__(self, baseline: float) -> None:
        self._baseline = baseline
        self._bets = np.array([min(bet, 1 / max(1 - baseline, 1e-12)) for bet in _BETS])  # a factor is never negative
        self._capital = np.zeros(len(_BETS))

    def update(self, acceptance: float) -> float:
        """The evidence after one more observation in [0, 1]."""
        self._capital = np.minimum((self._capital + 1) * (1 + self._bets * (self._baseline - acceptance)), 1e300)
        return float(self._capital.mean())


def acceptance_drift(
    acceptance: Float[np.ndarray, " prompts"], *, baseline: float, run_length: float = 10_000
) -> DriftAlarm:
    """An alarm when the mean acceptance of prompts lies below `baseline`, in [0, 1].

    `acceptance` is one number a prompt, in [0, 1]: tokens of one prompt resemble each other, so they don't count singly.
    Take the lower confidence limit of a certificate as the baseline, or chance alone is a fall. Raises `InternalError`
    for values outside [0, 1].

    >>> acceptance_drift(np.full(200, 0.4), baseline=0.7).first_alarm is not None
    True
    """
    inside = (acceptance >= 0) & (acceptance <= 1)
    if not inside.all() or not 0 <= baseline <= 1 or run_length < 1:
        msg = "acceptance and baseline must lie in [0, 1], and a run length must be at least 1"
        raise InternalError(msg)
    detector = DriftDetector(baseline)
    path = np.array([detector.update(accepted) for accepted in acceptance.tolist()])
    alarms = np.flatnonzero(path >= run_length)
    return DriftAlarm(path=path, run_length=run_length, first_alarm=int(alarms[0]) if len(alarms) else None)
