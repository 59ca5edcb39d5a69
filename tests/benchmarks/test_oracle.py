"""Seconds that the exact law takes: a rule on all twenty pairs of the oracle suite, and one whole decode unmerged."""

from __future__ import annotations

import pytest

from properties.oracle import NUM_PAIRS, decoder_of, distances, wanted_laws
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.law import decoded_law
from specverify.models.table import random_table
from specverify.verification.rules import RULES


@pytest.mark.parametrize("name", [name for name, named in RULES.items() if named.lossless])
def test_twenty_pairs(benchmark, name):
    """V=3, three drafts, four tokens; the reference laws are made once for all rules."""
    wanted_laws(greedy=name == "greedy")
    found = benchmark(distances, decoder_of(RULES[name]), greedy=name == "greedy")
    assert len(found) == NUM_PAIRS
    benchmark.extra_info["seconds_per_rule"] = benchmark.stats.stats.median


def test_whole_decode(benchmark):
    """Every path of up to four steps of chain rejection on one pair."""
    target, draft = (random_table(3, 5, seed=seed) for seed in (1, 2))
    decoder = Decoder(target=target, drafter=DraftModel(draft, 3), num_speculative_tokens=3)
    law = benchmark(decoded_law, decoder, max_new_tokens=4, eos_token_ids=(1,), merge=False)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
