"""Seconds that the exact law takes: a rule on all twenty pairs of the oracle suite, and one whole decode unmerged."""

from __future__ import annotations

import time

import pytest

from properties.oracle import NUM_PAIRS, decoder_of, distances, wanted_laws
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.law import decoded_law
from specverify.models.table import random_table
from specverify.verification.rules import RULES

MOST_SECONDS = 10.0
"""A fixed aim, in CPU time of the process, which a busy machine lengthens little."""


@pytest.mark.parametrize("name", [name for name, named in RULES.items() if named.lossless])
def test_twenty_pairs(benchmark, name):
    """V=3, three drafts, four tokens; the reference laws are made once for all rules."""
    wanted_laws(greedy=name == "greedy")
    found = benchmark(distances, decoder_of(RULES[name]), greedy=name == "greedy")
    assert len(found) == NUM_PAIRS
    if benchmark.enabled:
        benchmark.extra_info["seconds_per_rule"] = benchmark.stats.stats.median


def test_all_rules(benchmark):
    """The whole suite: at most ten seconds of one core, reference laws included; and every law is the target's."""
    wanted_laws.cache_clear()

    def every_rule():
        begun = time.process_time()
        worst = max(
            max(distances(decoder_of(named), greedy=name == "greedy").values())
            for name, named in RULES.items()
            if named.lossless
        )
        return worst, time.process_time() - begun

    worst, spent = benchmark.pedantic(every_rule, rounds=1)
    benchmark.extra_info["cpu_s"] = spent
    assert worst <= 1e-12
    assert spent <= MOST_SECONDS


def test_whole_decode(benchmark):
    """Every path of up to four steps of chain rejection on one pair."""
    target, draft = (random_table(3, 5, seed=seed) for seed in (1, 2))
    decoder = Decoder(target=target, drafter=DraftModel(draft, 3), num_speculative_tokens=3)
    law = benchmark(decoded_law, decoder, max_new_tokens=4, eos_token_ids=(1,), merge=False)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
