"""Races: what keys their times, who never wins, and what a script answers."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream, first_of_race
from specverify.choices.philox import Philox, philox4x32, race_noise, uniform53
from specverify.choices.scripted import Scripted

HERE = torch.tensor([0])


def laws(count: int, vocab_size: int = 33) -> torch.Tensor:
    """Rows with zeros."""
    rows = torch.rand(count, vocab_size, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    rows = torch.where(rows < 0.3, 0, rows)
    return rows / rows.sum(-1, keepdim=True)


def test_two_ids_share_a_block_of_the_generator():
    """Word for word: ids 2 b and 2 b + 1 have the halves of the block with counter (position, sequence, b + 1, TARGET)."""
    seed = 7 + (9 << 32)
    [times] = race_noise(torch.tensor([seed]), torch.tensor([3]), torch.tensor([5]), num_ids=5)
    for block in range(3):
        words = philox4x32(torch.tensor([5, 3, block + 1, int(Stream.TARGET)]), torch.tensor([7, 9])).tolist()
        for half in range(2 if block < 2 else 1):
            high, low = words[2 * half : 2 * half + 2]
            assert float(times[2 * block + half]) == ((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53
    first, drawn = (uniform53(*map(torch.tensor, (seed, int(Stream.TARGET), 3, 5, step))) for step in (3, 0))
    assert float(times[4]) == float(first)
    assert float(drawn) not in times.tolist()


def test_a_race_is_keyed_by_seed_sequence_and_position_alone():
    """Not by the step, nor by the batch, its order, or the other positions that are asked with it."""
    seeds, sequences = torch.tensor([3, 9, 9, 27]), torch.tensor([0, 0, 1, 0])
    position, step = torch.tensor([4, 0, 7, 2]), torch.tensor([1, 0, 5, 2])
    batch, rows = Philox(seeds, sequences, position, step), laws(12).view(4, 3, -1)
    winners = batch.race(rows, at=torch.arange(3))
    assert torch.equal(batch.moved(position, step + 5).race(rows, at=torch.arange(3)), winners)
    order = torch.tensor([2, 0, 3])
    assert torch.equal(batch.select(order).race(rows[order], at=torch.arange(3)), winners[order])
    for row in range(4):
        for at in range(3):
            alone = batch.select(torch.tensor([row])).moved(position[row : row + 1] + at, step[row : row + 1])
            assert int(alone.race(rows[row, at][None, None], at=HERE)) == int(winners[row, at])
    by_row = torch.tensor([[2], [0], [1], [2]])
    assert (
        batch.race(rows.gather(1, by_row[..., None].expand(-1, -1, 33)), at=by_row).tolist()
        == winners.gather(1, by_row).tolist()
    )


@pytest.mark.parametrize("changed", range(3))
def test_seed_sequence_and_position_each_change_the_times(changed: int):
    """Of 64 equally probable ids another one wins."""
    law = torch.full((1, 1, 64), 1 / 64, dtype=torch.float64)
    winners = set()
    for value in range(8):
        who = [torch.tensor([0])] * 3
        who[changed] = torch.tensor([value])
        winners.add(int(Philox(*who, torch.tensor([0])).race(law, at=HERE)))
    assert len(winners) > 4


def test_an_impossible_id_never_wins_and_a_sure_one_always_does():
    """Zeros around it, however small its probability is next to 1."""
    choices = Philox.start(torch.zeros(500, dtype=torch.int64), torch.arange(500))
    winners = choices.race(laws(1).expand(500, 1, -1), at=HERE)[:, 0]
    assert bool((laws(1)[0][winners] > 0).all())
    sure = torch.zeros(500, 1, 9, dtype=torch.float64)
    sure[..., 4] = 1
    assert choices.race(sure, at=HERE).unique().tolist() == [4]


def test_a_script_lets_the_most_probable_id_win():
    """All have the same time; ties go to the lowest id."""
    rows = torch.tensor([[[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]]])
    assert Scripted().race(rows, at=torch.arange(2)).tolist() == [[1, 0]]


def test_the_smallest_time_is_half_a_step_of_the_grid():
    """A uniform of 0 stands for 2^-54, so it loses to 2^-53 where that id is more than twice as probable."""
    times = torch.tensor([0.0, 2.0**-53], dtype=torch.float64)
    for probs, winner in [([0.3, 0.7], 1), ([0.34, 0.66], 0), ([0.0, 1.0], 1)]:
        assert int(first_of_race(torch.tensor(probs, dtype=torch.float64), times)) == winner
