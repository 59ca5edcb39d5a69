"""What a decode costs beside its forward passes, at batch 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specverify.context import Row
from specverify.decoding import speculative
from specverify.drafting import DraftModel
from specverify.models.transformers import TransformersModel
from specverify.timing import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specverify.decoding import Decoder
    from specverify.records import DecodeRequest

    Clock = Callable[[], float]

__all__ = ["overhead", "recorded"]


def recorded(decoder: Decoder) -> Decoder:
    """The same decoder, faster at batch 1; see Note [Recorded passes]."""
    return _with_models(decoder, TransformersModel.recorded)


def overhead(
    decoder: Decoder, requests: Sequence[DecodeRequest], *, repeats: int, clock: Clock
) -> dict[str, float | int | str]:
    """Milliseconds a step, in all and outside the passes of both models, at the median.

    Nothing on CUDA, where a pass runs on after its call.
    """
    if decoder.target.device.type != "cpu":
        return {}
    spent: list[float] = []
    timed = _with_models(decoder, lambda model: _timed(model, spent, clock))
    turns = []
    for _ in range(repeats + 1):  # the first warms up
        spent.clear()
        num_steps = 0

        def decode() -> None:
            nonlocal num_steps
            for request in requests:
                num_steps += sum(len(trace.steps) for trace in speculative(timed, [Row(request, 0)]))

        took = seconds(decoder.target.device, decode, clock)
        turns.append(((took - sum(spent)) / num_steps, took / num_steps, len(spent) / num_steps))
    rest, step, passes = map(float, np.median(turns[1:], axis=0))
    return {
        "step_ms": 1e3 * step,
        "overhead_per_step_ms": 1e3 * rest,
        "passes_per_step": passes,
    }


def _with_models(decoder: Decoder, change: Callable[[TransformersModel], TransformersModel]) -> Decoder:
    target, drafter = decoder.target, decoder.drafter
    if isinstance(target, TransformersModel):
        target = change(target)
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, TransformersModel):
        drafter = replace(drafter, model=change(drafter.model))
    return replace(decoder, target=target, drafter=drafter)


def _timed(model: TransformersModel, spent: list[float], clock: Clock) -> TransformersModel:
    """The same model, whose passes say what they took; prefilling is a pass too."""

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **arguments: Any) -> Any:  # noqa: ANN401 - whatever `run` takes and gives
            started = clock()
            result = run(*args, **arguments)
            spent.append(clock() - started)
            return result

        return call

    @dataclass(frozen=True, eq=False)
    class Timed(TransformersModel):
        def forward(self, *args: Tensor, **arguments: Any) -> Tensor:  # noqa: ANN401 - as the base class
            logits: Tensor = timed(super().forward)(*args, **arguments)
            return logits

    return Timed(model.module, model.name, None if model.passes is None else timed(model.passes))
