"""Coupled drafts: draft, rule and target-only sampling run the same race, so that ON and OFF say the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.choices.philox import Philox, uniform53
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.table import random_table
from specverify.records import DecodeRequest, SamplingParams, count
from specverify.verification import Proposal, Verification, leading, row_at
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE = 4
TARGET = random_table(VOCAB_SIZE, 9, seed=0)
DRAFT = random_table(VOCAB_SIZE, 9, seed=1)
NOISE = 99
"""A stream that no other question uses."""


@dataclass(frozen=True)
class Racing:
    """Philox with races: Exp(1) noise an id, keyed by the position alone."""

    inner: Philox

    def race(self, probs: torch.Tensor, *, at: torch.Tensor, guesses: torch.Tensor | None = None) -> torch.Tensor:
        """The first to arrive at the rate of its probability."""
        del guesses
        position = (self.inner.position[:, None] + at)[..., None]
        seed, sequence = self.inner.seed[:, None, None], self.inner.sequence[:, None, None]
        uniform = uniform53(seed, torch.tensor(NOISE), sequence, position, torch.arange(probs.shape[-1]))
        return (-torch.log1p(-uniform) / probs).argmin(-1)

    def draw(self, probs: torch.Tensor, **asked: object) -> torch.Tensor:
        """As ever."""
        return self.inner.draw(probs, **asked)

    def moved(self, position: torch.Tensor, step: torch.Tensor) -> Racing:
        """Elsewhere."""
        return Racing(self.inner.moved(position, step))

    def select(self, rows: torch.Tensor) -> Racing:
        """These rows."""
        return Racing(self.inner.select(rows))


def racing(rows: Sequence[Row]) -> Racing:
    """Of each request's seed and sample."""
    seeds, samples = ([row.request.seed for row in rows], [row.sample for row in rows])
    return Racing(Philox.start(torch.tensor(seeds), torch.tensor(samples)))


def coupled(proposal: Proposal, target_probs: torch.Tensor, choices: Racing) -> Verification:
    """Accept while the target's own race has the same winner [Daliri2024]."""
    wanted = choices.race(target_probs, at=torch.arange(target_probs.shape[1]))
    num_accepted = leading((proposal.token_ids == wanted[:, :-1]) & proposal.drafted)
    return Verification(num_accepted, row_at(wanted, num_accepted))


DECODER = Decoder(
    target=TARGET,
    drafter=DraftModel(DRAFT, VOCAB_SIZE, coupled=True),
    rule=coupled,
    drafts=Drafts.COUPLED,
    choices=racing,
)
ROWS = [
    Row(DecodeRequest(id=str(seed), prompt_ids=(seed % 4,) * (1 + seed % 2), params=params, seed=seed), sample)
    for seed in range(40)
    for sample in range(2)
    for params in (SamplingParams(max_new_tokens=7, repetition_penalty=1.2 if seed % 3 else 1.0),)
]


def texts(traces: object) -> dict[Row, tuple[int, ...]]:
    """What each row said."""
    return {Row(trace.request, trace.sample): trace.token_ids for trace in traces}


@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_coupled_decoding_says_what_the_target_alone_says(num_speculative_tokens: int) -> None:
    """Bit for bit at one seed, whatever was drafted, sampling parameters that read the prefix among them."""
    decoder = replace(DECODER, num_speculative_tokens=num_speculative_tokens)
    assert texts(speculative(decoder, ROWS)) == texts(autoregressive(decoder, ROWS))
    assert len(set(texts(autoregressive(decoder, ROWS)).values())) > 60


def test_coupled_drafts_are_the_targets_own_race() -> None:
    """A draft equal to the target is accepted always; one that draws apart is accepted less than one that races."""
    same = replace(DECODER, drafter=DraftModel(TARGET, VOCAB_SIZE, coupled=True))
    assert count(speculative(same, ROWS)).acceptance_rate == 1
    apart = replace(DECODER, drafter=DraftModel(DRAFT, VOCAB_SIZE))
    assert count(speculative(apart, ROWS)).acceptance_rate < count(speculative(DECODER, ROWS)).acceptance_rate - 0.1


def test_target_only_sampling_that_does_not_race_says_something_else() -> None:
    """What `Decoder.drafts` is for: the OFF arm of a coupled rule must run its race."""
    forgotten = replace(DECODER, drafts=Drafts.CHAIN)
    assert texts(speculative(forgotten, ROWS)) != texts(autoregressive(forgotten, ROWS))
