"""Texts that end in the wrong place, or say that they ended otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specverify.decoding import first_stop
from specverify.faults.fault import Fault
from specverify.faults.parameter import law_of
from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.decoding import Decoder, Stop

    Cut = tuple[int, FinishReason | None]

__all__ = ["STOP_FAULTS"]


def _at_block_end_only(*unseen: FinishReason) -> Stop:
    """Stops of a kind are seen only in the last token of a step; what was accepted before it goes on."""

    def stop(context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]) -> list[Cut]:
        whole = torch.minimum(num_emitted, context.limits - context.lengths).tolist()
        limited = (context.lengths + num_emitted >= context.limits).tolist()
        return [
            (count, FinishReason.LENGTH if at_limit else None) if finish in unseen and kept < count else (kept, finish)
            for (kept, finish), count, at_limit in zip(
                first_stop(context, emitted, num_emitted), whole, limited, strict=True
            )
        ]

    return stop


def _one_past_limit(context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]) -> list[Cut]:
    """The limit is checked before a step's last token is counted."""
    limits, context.limits = context.limits, context.limits + 1
    try:
        return first_stop(context, emitted, num_emitted)
    finally:
        context.limits = limits


def _eos_dropped(context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]) -> list[Cut]:
    """The EOS ends the text and is not handed out."""
    return [
        (kept - 1 if finish is FinishReason.EOS else kept, finish)
        for kept, finish in first_stop(context, emitted, num_emitted)
    ]


def _eos_twice(context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]) -> list[Cut]:
    """An EOS inside a block is emitted, and once more where the text is closed."""
    cuts = first_stop(context, emitted, num_emitted)
    room = (context.limits - context.lengths).tolist()
    for row, (kept, finish) in enumerate(cuts):
        if finish is FinishReason.EOS and kept < min(room[row], emitted.shape[1]):
            emitted[row, kept] = emitted[row, kept - 1]
            cuts[row] = (kept + 1, finish)
    return cuts


def _string_one_late(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[Cut]:
    """A stop string is looked for in the text without the token that has just come."""
    cuts = first_stop(context, emitted, num_emitted)
    room = (context.limits - context.lengths).tolist()
    for row, (kept, finish) in enumerate(cuts):
        params = context.rows[row].request.params
        by_string = finish is FinishReason.STOP and int(emitted[row, kept - 1]) not in params.stop_token_ids
        if not by_string or context.completes_stop_string(row, []):
            continue
        if kept < min(int(num_emitted[row]), room[row]):
            cuts[row] = (kept + 1, finish)
        else:
            cuts[row] = (kept, FinishReason.LENGTH if kept == room[row] else None)
    return cuts


def _hidden_by_limit(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[Cut]:
    """A stop in the last token before the limit is reported as the limit."""
    room = (context.limits - context.lengths).tolist()
    return [
        (kept, FinishReason.LENGTH if finish is not None and kept == most else finish)
        for (kept, finish), most in zip(first_stop(context, emitted, num_emitted), room, strict=True)
    ]


def _with(stop: Stop) -> Callable[[Decoder], Decoder]:
    return lambda decoder: replace(decoder, stop=stop)


STOP_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="eos-inside-block-ignored",
        stands_for="an EOS that is accepted inside a block does not end the text",
        caught_by=("stopping",),
        apply=_with(_at_block_end_only(FinishReason.EOS)),
    ),
    Fault(
        name="stop-inside-block-ignored",
        stands_for="a stop id or stop string that is accepted inside a block does not end the text",
        caught_by=("stopping",),
        apply=_with(_at_block_end_only(FinishReason.STOP)),
    ),
    Fault(
        name="stop-string-one-late",
        stands_for="a stop string is looked for before the token that completes it is appended",
        caught_by=("stopping",),
        apply=_with(_string_one_late),
    ),
    Fault(
        name="stop-hidden-by-limit",
        stands_for="a stop in the last token before the limit is reported as a text that was cut off",
        caught_by=("stopping",),
        apply=_with(_hidden_by_limit),
    ),
    Fault(
        name="one-past-limit",
        stands_for="one token more than the limit is emitted",
        caught_by=("stopping",),
        apply=_with(_one_past_limit),
    ),
    Fault(
        name="eos-dropped",
        stands_for="the ids end before the EOS that ended the text",
        caught_by=("stopping",),
        apply=_with(_eos_dropped),
    ),
    Fault(
        name="eos-twice",
        stands_for="an EOS inside a block is emitted twice",
        caught_by=("stopping",),
        apply=_with(_eos_twice),
    ),
    Fault(
        name="min-length-ignored",
        stands_for="an EOS is accepted before the least number of new tokens",
        caught_by=("stopping",),
        apply=lambda decoder: replace(
            decoder, law=law_of(lambda params: [replace(one, min_new_tokens=0) for one in params])
        ),
    ),
)
"""EOS, stop ids, stop strings, limits."""
