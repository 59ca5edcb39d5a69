"""Speculative texts a second on one core, by the rule itself and by the exact laws of its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.models.table import random_table
from specverify.tabulated import sample, sample_steps, tabulate, tabulate_rule
from specverify.verification.rules import RULES

SIZES = [pytest.param(8, 4, id="V=8,4 tokens"), pytest.param(64, 2, id="V=64,2 tokens")]
CLOSENESS = [pytest.param(0.0, id="independent"), pytest.param(0.8, id="close")]
NUM_SPECULATIVE_TOKENS = 3
CHAIN = RULES["chain"].rule


def pair_of(vocab_size, tokens, closeness=0.0):
    """Random tables; the draft's logits are the target's to the share `closeness`."""
    target, draft = (random_table(vocab_size, tokens + 1, seed=seed) for seed in (1, 2))
    mixed = (closeness * p + (1 - closeness) * q for p, q in zip(target.levels, draft.levels, strict=True))
    draft = replace(draft, levels=tuple(logits.log_softmax(-1) for logits in mixed))
    return tabulate(target, draft, max_new_tokens=tokens)


def record(benchmark, samples, num_sequences):
    """The rate, and how long a sequence's way was."""
    if benchmark.enabled:  # it isn't under xdist
        benchmark.extra_info["sequences_per_s"] = num_sequences / benchmark.stats.stats.median
    benchmark.extra_info["steps_per_sequence"] = float(samples.num_steps.double().mean())
    benchmark.extra_info["accepted_per_step"] = int(samples.num_accepted_tokens.sum()) / int(samples.num_steps.sum())


@pytest.mark.parametrize("closeness", CLOSENESS)
@pytest.mark.parametrize(("vocab_size", "tokens"), SIZES)
def test_rule(benchmark, vocab_size, tokens, closeness):
    """The unchanged chain rule on looked-up laws."""
    pair, count = pair_of(vocab_size, tokens, closeness), 200_000
    samples = benchmark(sample, pair, CHAIN, count, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    record(benchmark, samples, count)


@pytest.mark.parametrize(("vocab_size", "tokens"), SIZES)
def test_steps(benchmark, vocab_size, tokens):
    """Whole steps from tables, which were made before."""
    pair, count = pair_of(vocab_size, tokens), 1_000_000
    table = tabulate_rule(pair, CHAIN, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    samples = benchmark(sample_steps, pair, table, count)
    record(benchmark, samples, count)


@pytest.mark.parametrize(("vocab_size", "tokens"), SIZES)
def test_tabulating_a_rule(benchmark, vocab_size, tokens):
    """What the tables of `test_steps` cost, once a rule and pair."""
    pair = pair_of(vocab_size, tokens)
    table = benchmark(tabulate_rule, pair, CHAIN, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    benchmark.extra_info["outcomes"] = len(table.threshold)
