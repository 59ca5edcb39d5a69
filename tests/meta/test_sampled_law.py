"""A million texts of each rule against the exact law: the right rules pass, wrong rules and shared uniforms don't."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.faults import find_fault
from specverify.law import Law, autoregressive_law, decoded_law, total_variation
from specverify.models.table import random_table
from specverify.statistics.categorical import ChiSquare, chi_square, smallest_detectable_tv
from specverify.tabulated import Samples, TabulatedPair, sample, sample_steps, tabulate, tabulate_rule
from specverify.verification.rules import RULES, Drafts

if TYPE_CHECKING:
    from specverify.verification import Rule

NUM_SAMPLES = 1_000_000
NUM_SPECULATIVE_TOKENS = 3
ASKED = {"max_new_tokens": 4, "eos_token_ids": (1,)}
FALSE_FAIL_RATE = 1e-6
FALSE_PASS_RATE = 1e-2
SAMPLED = [
    name
    for name, named in RULES.items()
    if named.lossless and named.drafts is Drafts.CHAIN and name != "greedy"  # greedy has no law, only a text
]


@dataclass(frozen=True)
class Subject:
    """A pair of tables of four ids, and the law of the target alone."""

    pair: TabulatedPair
    law: Law
    decoder: Decoder

    def expected(self) -> np.ndarray:
        """The law in the order of the nodes."""
        probs = np.zeros(self.pair.num_texts)
        for ids, weight in self.law.items():
            probs[self.pair.node(ids)] = weight
        return probs

    def judged(self, samples: Samples) -> ChiSquare:
        """Counts of whole texts against the law."""
        counts = np.bincount(samples.nodes.numpy(), minlength=self.pair.num_texts)
        return chi_square(counts, self.expected())


@cache
def subject() -> Subject:
    """Made once."""
    target, draft = (random_table(4, 5, seed=seed) for seed in (0, 1))
    pair = tabulate(target, draft, **ASKED)
    return Subject(pair, autoregressive_law(target, **ASKED), Decoder(target=target, drafter=DraftModel(draft, 4)))


def decoded(rule: Rule) -> Samples:
    """By the rule itself."""
    return sample(subject().pair, rule, NUM_SAMPLES, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)


def decoded_by_steps(rule: Rule) -> Samples:
    """By the exact laws of its steps."""
    table = tabulate_rule(subject().pair, rule, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    return sample_steps(subject().pair, table, NUM_SAMPLES)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_million_texts_follow_the_law(name: str) -> None:
    """Right rules pass at a false alarm rate of 1e-6, by the rule and by the table of its steps."""
    for sampler in (decoded, decoded_by_steps):
        assert subject().judged(sampler(RULES[name].rule)).p_value > FALSE_FAIL_RATE


def test_a_million_texts_show_half_a_percent() -> None:
    """What the passes above are worth."""
    detectable = smallest_detectable_tv(
        subject().expected(), NUM_SAMPLES, false_fail_rate=FALSE_FAIL_RATE, false_pass_rate=FALSE_PASS_RATE
    )
    assert detectable < 0.006


@pytest.mark.parametrize("name", ["residual-wrong-row", "residual-not-clamped", "ratio-inflated"])
def test_wrong_rules_fail(name: str) -> None:
    """Both samplers show a wrong law, and the rule's exact law says how wrong it is."""
    decoder = find_fault(name).apply(subject().decoder)
    assert total_variation(decoded_law(decoder, **ASKED), subject().law) > 0.01
    for sampler in (decoded, decoded_by_steps):
        assert subject().judged(sampler(decoder.rule)).p_value < FALSE_FAIL_RATE


@pytest.mark.parametrize("name", ["draft-noise-in-accept", "draft-noise-in-residual", "accept-noise-in-residual"])
def test_shared_uniforms_fail_only_where_uniforms_are_drawn(name: str) -> None:
    """The law of the rule is right if its uniforms are independent, so only the rule itself shows that they are not."""
    rule = find_fault(name).apply(subject().decoder).rule
    assert subject().judged(decoded(rule)).p_value < FALSE_FAIL_RATE
    assert subject().judged(decoded_by_steps(rule)).p_value > FALSE_FAIL_RATE
