"""coupling: a coupled text is that of target-only races, bit for bit; winners agree as often as the formula says.

Faults that it must catch: noise keyed by the step, noise that draft and target don't share, a race run backwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specverify.choices.philox import Philox
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.table import random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification.coupling import gumbel_coupling, match_probability
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEEDS = st.integers(0, 2**20)
VOCAB_SIZE, LENGTH, RACES = 5, 5, 20_000
STANDARD_ERRORS = 5
"""Of a sampled share; a right one is outside once in 1.7 million samples."""
HERE = torch.tensor([0])
TABLES = [[random_table(VOCAB_SIZE, LENGTH, seed=2 * seed + which, zeros=0.2) for which in (0, 1)] for seed in range(7)]


# ---------------------------------------------------------------------------------------------------------- texts


class KeyedByStep(Philox):
    """A race whose noise is fresh in every step: what every other question wants, and this one must not have."""

    def race(self, probs: torch.Tensor, **asked: torch.Tensor) -> torch.Tensor:
        """At a position that no other step knows."""
        return Philox.race(replace(self, position=self.position + 1_000 * self.step), probs, **asked)

    def moved(self, position: torch.Tensor, step: torch.Tensor) -> KeyedByStep:
        """Elsewhere."""
        return KeyedByStep(self.seed, self.sequence, position, step, self.window)

    def select(self, rows: torch.Tensor) -> KeyedByStep:
        """These rows."""
        return KeyedByStep(*(each[rows] for each in (self.seed, self.sequence, self.position, self.step)), self.window)


def texts(seed: int, num_speculative_tokens: int, make: Callable[..., Philox] = Philox) -> list[list[tuple[int, ...]]]:
    """Four samples of one request, with and without speculation."""
    target, draft = TABLES[seed % len(TABLES)]

    def choices(rows: Sequence[Row]) -> Philox:
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        return make(zeros + seed, torch.tensor([row.sample for row in rows]), zeros, zeros)

    decoder = Decoder(
        target=target,
        drafter=DraftModel(draft, VOCAB_SIZE, coupled=True),
        rule=gumbel_coupling,
        drafts=Drafts.COUPLED,
        num_speculative_tokens=num_speculative_tokens,
        choices=choices,
    )
    rows = [
        Row(DecodeRequest(id="text", prompt_ids=(0,), params=SamplingParams(max_new_tokens=LENGTH)), sample)
        for sample in range(4)
    ]
    found = [
        sorted(algorithm(decoder, rows), key=lambda trace: trace.sample) for algorithm in (speculative, autoregressive)
    ]
    return [[trace.token_ids for trace in traces] for traces in found]


@given(seed=SEEDS, num_speculative_tokens=st.integers(1, 4))
def test_a_coupled_text_is_the_targets_own(seed: int, num_speculative_tokens: int) -> None:
    """Whatever the draft says and however long its blocks are, at temperature 1."""
    on, off = texts(seed, num_speculative_tokens)
    assert on == off


def test_a_text_that_is_keyed_by_the_step_is_another() -> None:
    """The equality can fail."""
    assert any(on != off for on, off in (texts(seed, 2, KeyedByStep) for seed in range(4)))


# -------------------------------------------------------------------------------------------------------- winners


def laws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows over seven ids, an odd number, since a block of the generator makes the noise of two."""
    rows = random_table(7, 1, seed=seed, zeros=0.2).levels[1].exp()
    return rows[0], rows[1]


def literal_match_probability(p: torch.Tensor, q: torch.Tensor) -> float:
    """The double sum as it is written."""
    return sum(
        1 / sum(max(float(p[y] / p[x]), float(q[y] / q[x])) for y in range(len(p)))
        for x in range(len(p))
        if p[x] > 0 and q[x] > 0
    )


@given(seed=SEEDS)
def test_the_match_probability_is_the_double_sum(seed: int) -> None:
    """With zeros on either side; between (1 - TV) / (1 + TV) and 1 - TV [Daliri2024, Thm. 2]."""
    p, q = laws(seed)
    match = float(match_probability(p, q))
    distance = float((p - q).abs().sum()) / 2
    assert match == pytest.approx(literal_match_probability(p, q), abs=1e-14)
    assert (1 - distance) / (1 + distance) - 1e-14 <= match <= 1 - distance + 1e-14
    assert float(match_probability(p, p)) == pytest.approx(1, abs=1e-14)


def test_the_match_probability_is_of_each_row() -> None:
    """Rows of a batch by themselves."""
    p, q = (torch.stack([laws(seed)[which] for seed in range(3)]) for which in (0, 1))
    assert match_probability(p, q).tolist() == [float(match_probability(*laws(seed))) for seed in range(3)]


def start(seed: int) -> Philox:
    """Many sequences of one seed."""
    return Philox.start(torch.full((RACES,), seed), torch.arange(RACES))


def shared(choices: Philox, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Both winners, [2, races]."""
    return torch.stack([choices.race(law.expand(RACES, 1, -1), at=HERE)[:, 0] for law in (p, q)])


def unshared(choices: Philox, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The draft's noise is that of the next position."""
    return torch.stack([shared(choices, p, q)[0], shared(choices.moved(choices.position + 1, choices.step), p, q)[1]])


def backwards(choices: Philox, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The draft's noise is that of the ids in reverse."""
    return torch.stack([shared(choices, p, q)[0], len(p) - 1 - shared(choices, p, q.flip(0))[1]])


def off_by(races: Callable[[Philox, torch.Tensor, torch.Tensor], torch.Tensor], seed: int) -> float:
    """How many standard errors the share of equal winners lies from the formula's."""
    p, q = laws(seed)
    winners = races(start(seed), p, q)
    expected = float(match_probability(p, q))
    error = (expected * (1 - expected) / RACES) ** 0.5
    return abs(float((winners[0] == winners[1]).double().mean()) - expected) / error


@pytest.mark.parametrize("seed", range(4))
def test_winners_agree_as_often_as_the_formula_says(seed: int) -> None:
    """And an id wins as often as its probability says, one of probability 0 never."""
    assert off_by(shared, seed) < STANDARD_ERRORS
    p, q = laws(seed)
    shares = shared(start(100 + seed), p, q)[0].bincount(minlength=7) / RACES
    assert bool(((shares - p).abs() <= STANDARD_ERRORS * (p * (1 - p) / RACES).sqrt()).all())


@pytest.mark.parametrize("races", [unshared, backwards])
def test_winners_of_other_noise_agree_less_often(races: Callable[..., torch.Tensor]) -> None:
    """A coupling that is none is seen on every one of these laws."""
    assert min(off_by(races, seed) for seed in range(4)) > 2 * STANDARD_ERRORS
