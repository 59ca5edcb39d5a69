"""What process 0 tells the processes that follow it: one operation on the target, in whole numbers, so that there is no pickle."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from numpy import ndarray

__all__ = ["PASSES", "Operation", "flat", "receive", "send", "sequences"]

_WORDS = 1024
"""Numbers in the first part of a message; longer ones have a second part."""


class Operation(IntEnum):
    """What the first process asks of the others."""

    STOP = 0
    FORGET = 1
    OPEN = 2
    LOGITS = 3
    APPEND = 4
    KEEP = 5
    ROLLBACK = 6
    SELECT = 7


PASSES = frozenset({Operation.OPEN, Operation.LOGITS, Operation.APPEND})
"""What runs the model; the rest is bookkeeping."""


def send(
    group: dist.ProcessGroup, operation: Operation, session: int = 0, arrays: Sequence[Int[ndarray, "..."]] = ()
) -> None:
    """From process 0 to all others of the group."""
    words = [np.array([operation, session, len(arrays)])]
    for array in arrays:
        words += [np.array([array.ndim, *array.shape]), array.ravel()]
    sent = np.concatenate(words).astype(np.int64)
    first = np.zeros(_WORDS, dtype=np.int64)
    first[0] = len(sent)
    inline = sent[: _WORDS - 1]
    first[1 : 1 + len(inline)] = inline
    dist.broadcast(torch.from_numpy(first), src=0, group=group)
    if len(sent) > len(inline):
        dist.broadcast(torch.from_numpy(sent[_WORDS - 1 :].copy()), src=0, group=group)


def receive(group: dist.ProcessGroup) -> tuple[Operation, int, list[Int[ndarray, "..."]]]:
    """What process 0 has sent; waits for it."""
    first = torch.zeros(_WORDS, dtype=torch.int64)
    dist.broadcast(first, src=0, group=group)
    length = int(first[0])
    words = first[1 : 1 + length]
    if length > len(words):
        rest = torch.zeros(length - len(words), dtype=torch.int64)
        dist.broadcast(rest, src=0, group=group)
        words = torch.cat((words, rest))
    received = words.numpy()
    arrays, place = [], 3
    for _ in range(int(received[2])):
        ndim = int(received[place])
        shape = received[place + 1 : place + 1 + ndim]
        place += 1 + ndim
        size = int(np.prod(shape))
        arrays.append(received[place : place + size].reshape(shape))
        place += size
    return Operation(int(received[0])), int(received[1]), arrays


def flat(rows: Sequence[Sequence[int]]) -> list[Int[ndarray, " numbers"]]:
    """Rows of different length as arrays; see `sequences`."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return [lengths, np.array([token for row in rows for token in row], dtype=np.int64)]


def sequences(lengths: Int[ndarray, " batch"], tokens: Int[ndarray, " tokens"]) -> list[list[int]]:
    """The rows that `flat` took apart."""
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []
