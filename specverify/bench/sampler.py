"""Speculative texts a second from tables: the sampler of the sampled checks, by the rule itself and by its steps' laws."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from specverify.bench.report import Comparison, comparisons_of
from specverify.models.table import random_table
from specverify.tabulated import sample, sample_steps, tabulate, tabulate_rule
from specverify.timing import in_turns
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SAMPLER_SIZES", "sampler_suite"]

SAMPLER_SIZES = ((8, 4), (64, 2))
"""Ids of the vocabulary, and tokens of a text."""
_BY_RULE, _BY_STEPS = "the rule on looked-up laws", "whole steps looked up"
_DRAFTS = 3


def sampler_suite(
    vocab_size: int,
    tokens: int,
    *,
    repeats: int,
    sequences: int = 200_000,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Comparison, ...]:
    """Chain rejection on random tables, which are made before; on the CPU."""
    target, draft = (random_table(vocab_size, tokens + 1, seed=seed) for seed in (1, 2))
    pair, rule = tabulate(target, draft, max_new_tokens=tokens), RULES["chain"].rule
    table = tabulate_rule(pair, rule, num_speculative_tokens=_DRAFTS)
    taken = in_turns(
        {
            _BY_RULE: lambda: sample(pair, rule, sequences, num_speculative_tokens=_DRAFTS),
            _BY_STEPS: lambda: sample_steps(pair, table, sequences),
        },
        device=torch.device("cpu"),
        repeats=repeats,
        clock=clock,
    )
    name = f"sampler/V={vocab_size},g={_DRAFTS},{tokens} tokens"
    return comparisons_of(taken, of=name, baseline=_BY_RULE, units=sequences, unit="sequences")
