"""lossless: a whole decode emits the target's law, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from properties.strategies import Instance, instances
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.faults import find_fault
from specverify.law import autoregressive_law, decoded_law, total_variation
from specverify.models.table import random_table
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from specverify.verification import Rule

TOLERANCE = 1e-12


def distance(rule: Rule, instance: Instance) -> float:
    """TV distance between what the loop emits under `rule` and what the target alone would."""
    decoder = Decoder(
        target=instance.target,
        drafter=DraftModel(instance.draft, instance.target.vocab_size),
        rule=rule,
        num_speculative_tokens=instance.num_speculative_tokens,
    )
    asked = {"max_new_tokens": instance.max_new_tokens, "eos_token_ids": instance.eos_token_ids}
    return total_variation(decoded_law(decoder, **asked), autoregressive_law(instance.target, **asked))


@pytest.mark.parametrize("name", ["chain", "match"])
@given(instance=instances())
def test_decode_emits_the_targets_law(name: str, instance: Instance) -> None:
    """Every path of the unchanged loop, with exact weights."""
    assert distance(RULES[name].rule, instance) <= TOLERANCE


FAULTS = (
    "residual-from-target", "residual-wrong-row", "residual-not-clamped", "bonus-from-draft", "always-accept",
    "ratio-inflated", "greedy-verification",
)  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_property_fails_on_its_faults(name: str) -> None:
    """A property that can't fail proves nothing."""
    instance = Instance(random_table(3, 4, seed=0), random_table(3, 4, seed=1), 2, 3, ())
    bare = Decoder(target=instance.target, drafter=DraftModel(instance.draft, 3))
    assert distance(find_fault(name).apply(bare).rule, instance) > 1e-3
