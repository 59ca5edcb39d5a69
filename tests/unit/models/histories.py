"""Random histories of a session, held against a recompute without a cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.models.transformers import TransformersModel, TransformersSession

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.25}
"""Greatest difference of two logits near 1 that another order of summation may cause."""

_MOST_TOKENS = 48


def worst_difference(model: TransformersModel, *, seed: int, steps: int = 24) -> float:
    """Replay a random history of append, rollback and select; the greatest |cached - recomputed| logit seen in it."""
    chance = random.Random(seed)
    rows = [_ids(model, chance, chance.choice([0, 1, 3, 9])) for _ in range(chance.choice([1, 3, 4]))]
    session = model.open(rows)
    worst = 0.0
    for _ in range(steps):
        action = chance.choice(["append", "append", "rollback", "select"])
        if action == "append":
            worst = max(worst, append(model, session, rows, chance))
        elif action == "rollback":
            rows[:] = [row[: max(0, len(row) - chance.randint(0, 4))] for row in rows]
            session.rollback(torch.tensor([len(row) for row in rows]))
        else:
            kept = [chance.randrange(len(rows)) for _ in range(chance.choice([1, 2, 4]))]
            rows[:] = [rows[index] for index in kept]
            session.select(torch.tensor(kept))
        assert session.lengths.tolist() == [len(row) for row in rows]
    return worst


def append(
    model: TransformersModel, session: TransformersSession, rows: list[list[int]], chance: random.Random
) -> float:
    """Append a random ragged block to `rows` and session; the greatest difference from a recompute."""
    block = chance.choice([1, 3, 5])
    added = [_ids(model, chance, min(chance.randint(0, block), _MOST_TOKENS - len(row))) for row in rows]
    rubbish = 10**6  # whatever stands after a row's tokens is never read
    token_ids = torch.tensor([ids + [rubbish] * (block - len(ids)) for ids in added])
    logits = session.append(token_ids, torch.tensor([len(ids) for ids in added]))
    rows[:] = [row + ids for row, ids in zip(rows, added, strict=True)]
    return difference(model, logits, rows, [len(ids) for ids in added])


def difference(
    model: TransformersModel, logits: torch.Tensor, rows: Sequence[Sequence[int]], num_tokens: Sequence[int]
) -> float:
    """The greatest difference between the logits of each row's last tokens and a recompute without a cache."""
    worst = 0.0
    recomputed = model.logits(rows)
    for index, (row, added) in enumerate(zip(rows, num_tokens, strict=True)):
        if added:
            expected = recomputed[index, len(row) - added : len(row)]
            worst = max(worst, float((logits[index, :added] - expected).abs().max()))
    return worst


def _ids(model: TransformersModel, chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(model.vocab_size) for _ in range(count)]
