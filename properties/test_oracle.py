"""oracle: every lossless rule, on twenty pairs of tables, in whole decodes of the unchanged loop; nothing is sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from properties.oracle import (
    BRANCHING,
    NUM_PAIRS,
    NUM_RANDOM_PAIRS,
    VOCAB_SIZE,
    StopsAtUnlikely,
    VaryingLengths,
    decoder_of,
    distances,
    requests,
    stacked_pairs,
)
from specverify.decoding import Decoder
from specverify.drafting import DraftModel, drafter_for
from specverify.faults import find_fault
from specverify.law import autoregressive_law, decoded_law, greedy_law, step_laws, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-12
LOSSLESS = [name for name, named in RULES.items() if named.lossless]


def faulty(name: str) -> Decoder:
    """Chain rejection over all pairs, with a planted fault."""
    return find_fault(name).apply(decoder_of(RULES["chain"]))


# ---------------------------------------------------------------------------------------------------- the whole decode


@pytest.mark.parametrize("name", LOSSLESS)
def test_rule_emits_the_targets_law(name: str) -> None:
    """Every path of every step, with exact weights: whole texts, EOS and length limit included."""
    found = distances(decoder_of(RULES[name]), greedy=name == "greedy")
    assert len(found) == NUM_PAIRS
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", LOSSLESS)
def test_draft_lengths_that_do_not_look_ahead_are_harmless(name: str) -> None:
    """How much is drafted may depend on anything before the block."""
    decoder = decoder_of(RULES[name])
    varied = replace(decoder, drafter=VaryingLengths(decoder.drafter))
    found = distances(varied, greedy=name == "greedy", num_pairs=NUM_RANDOM_PAIRS)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", LOSSLESS)
def test_whole_decodes_emit_the_targets_law(name: str) -> None:
    """Without merging, so that what is carried from step to step (caches, rollback) is in the proof."""
    target, draft = (random_table(VOCAB_SIZE, 4, seed=seed) for seed in (50, 51))
    named = RULES[name]
    drafter = drafter_for(named.drafts, draft, VOCAB_SIZE, branching=BRANCHING)
    decoder = Decoder(target=target, drafter=drafter, rule=named.rule, drafts=named.drafts, num_speculative_tokens=2)
    asked = {"max_new_tokens": 3, "eos_token_ids": (1,)}
    wanted = greedy_law(target, **asked) if name == "greedy" else autoregressive_law(target, **asked)
    assert total_variation(decoded_law(decoder, **asked, merge=False), wanted) <= TOLERANCE


WHOLE_DECODE_FAULTS = (
    "residual-from-target", "residual-wrong-row", "residual-not-clamped", "bonus-from-draft", "always-accept",
    "ratio-inflated", "ratio-square-root", "greedy-verification", "draft-temperature", "raw-draft-probs",
    "greedy-draft-softmax", "eos-inside-block-ignored", "one-past-limit",
)  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_DECODE_FAULTS)
def test_oracle_fails_on_its_faults(name: str) -> None:
    """A property that can't fail proves nothing."""
    assert max(distances(faulty(name), num_pairs=NUM_RANDOM_PAIRS).values()) > 1e-3


# ------------------------------------------------------------------------------------------------------ how much is accepted

OVERLAPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "chain": torch.minimum,
    "match": torch.mul,
}
"""The measure of drafting an id and accepting it, summed over the ids: the acceptance at a context."""


def accepted_and_expected(
    decoder: Decoder, overlap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[float]:
    """For each pair the mean number of accepted tokens in a step of three drafts, less the sum of overlaps along texts."""
    params = SamplingParams(max_new_tokens=4)
    asked = [DecodeRequest(id=each.id, prompt_ids=each.prompt_ids, params=params) for each in requests()]
    differences = []
    for request, law in zip(asked, step_laws(decoder, asked), strict=True):
        accepted = sum(weight * block.num_accepted_tokens for block, weight in law.items())
        differences.append(accepted - _overlap_after(request.prompt_ids, overlap, places=3))
    return differences


def _overlap_after(
    prefix: tuple[int, ...], overlap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, places: int
) -> float:
    """The sum over places, and over the ids up to each, of products of overlaps [Leviathan2023, §3.1]."""
    if places == 0:
        return 0.0
    target, draft = stacked_pairs()
    shares = overlap(target.row(prefix).exp(), draft.row(prefix).exp()).tolist()
    return sum(
        share * (1 + _overlap_after((*prefix, token), overlap, places=places - 1))
        for token, share in enumerate(shares)
        if share > 0
    )


@pytest.mark.parametrize("name", OVERLAPS)
def test_accepted_tokens_add_up_to_the_overlaps(name: str) -> None:
    """The mean number of accepted tokens, exactly, where acceptance depends on the whole prefix."""
    assert max(map(abs, accepted_and_expected(decoder_of(RULES[name]), OVERLAPS[name]))) <= TOLERANCE


ACCEPTANCE_FAULTS = ("always-accept", "ratio-inflated", "ratio-square-root", "greedy-verification", "draft-temperature")


@pytest.mark.parametrize("name", ACCEPTANCE_FAULTS)
def test_acceptance_fails_on_its_faults(name: str) -> None:
    """Accepting too much, too little, or the wrong drafts."""
    assert max(map(abs, accepted_and_expected(faulty(name), OVERLAPS["chain"]))) > 1e-3


def tokens_in_a_step(change: Callable[[Decoder], Decoder], num_speculative_tokens: int) -> tuple[float, float]:
    """Mean tokens of a step on tables without context, and the acceptance rate Σ min(p, q) at each of its positions."""
    target_row, draft_row = (random_table(VOCAB_SIZE, 0, seed=seed).levels[0][0] for seed in (0, 1))
    depth = num_speculative_tokens + 2
    target, draft = (
        TableModel(tuple(row.expand(VOCAB_SIZE**length, -1) for length in range(depth)))
        for row in (target_row, draft_row)
    )
    decoder = Decoder(
        target=target, drafter=DraftModel(draft, VOCAB_SIZE), num_speculative_tokens=num_speculative_tokens
    )
    params = SamplingParams(max_new_tokens=num_speculative_tokens + 1)
    [law] = step_laws(change(decoder), [DecodeRequest(id="step", prompt_ids=(0,), params=params)])
    tokens = sum(weight * len(block.token_ids) for block, weight in law.items())
    return tokens, float(torch.minimum(target_row.exp(), draft_row.exp()).sum())


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 4])
def test_tokens_in_a_step_are_a_geometric_sum(num_speculative_tokens: int) -> None:
    """(1 - a^(g+1)) / (1 - a) where every position accepts with probability a [Leviathan2023, Eq. 1]."""
    tokens, rate = tokens_in_a_step(lambda decoder: decoder, num_speculative_tokens)
    assert tokens == pytest.approx((1 - rate ** (num_speculative_tokens + 1)) / (1 - rate), abs=TOLERANCE)


@pytest.mark.parametrize("name", ACCEPTANCE_FAULTS)
def test_tokens_in_a_step_fail_on_their_faults(name: str) -> None:
    """A wrong acceptance is a wrong length."""
    tokens, rate = tokens_in_a_step(find_fault(name).apply, 3)
    assert abs(tokens - (1 - rate**4) / (1 - rate)) > 1e-3


# ------------------------------------------------------------------------------------------------------ where drafts end


def test_stopping_after_an_unlikely_token_is_right_and_dropping_it_is_not() -> None:
    """A draft that is cut because of its last token was not drawn from the law that is reported for it."""
    decoder = decoder_of(RULES["chain"])
    after, dropped = (
        distances(
            replace(decoder, drafter=StopsAtUnlikely(decoder.drafter, least=0.3, dropped=drops)),
            num_pairs=NUM_RANDOM_PAIRS,
        )
        for drops in (False, True)
    )
    assert max(after.values()) <= TOLERANCE
    assert 0.1 < sum(dropped.values()) / NUM_RANDOM_PAIRS < 0.3
