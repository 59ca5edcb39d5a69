"""Verification throughput next to the copy rate of the same logits, in the same run."""

from __future__ import annotations

import time

import torch

from specverify.choices.philox import Philox
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection

BATCH, DRAFTS, VOCAB_SIZE = 16, 5, 8_192


def test_chain_rejection(benchmark):
    """One verification step of 16 sequences; the record says how many copies of its input it costs."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(BATCH, DRAFTS + 1, VOCAB_SIZE, generator=generator, dtype=torch.float64).softmax(-1)
    draft = torch.randn(BATCH, DRAFTS, VOCAB_SIZE, generator=generator, dtype=torch.float64).softmax(-1)
    ids = torch.randint(VOCAB_SIZE, (BATCH, DRAFTS), generator=generator)
    proposal = Proposal(ids, torch.full((BATCH,), DRAFTS), draft)
    seeds = torch.arange(BATCH)

    def step():
        return chain_rejection(proposal, target, Philox.start(seeds, seeds, window=DRAFTS + 1))

    verification = benchmark(step)
    assert verification.num_accepted_tokens.shape == (BATCH,)
    started = time.perf_counter()
    for _ in range(20):
        target.clone(), draft.clone()
    copy_s = (time.perf_counter() - started) / 20
    benchmark.extra_info["copies_of_the_input"] = benchmark.stats.stats.median / copy_s
    benchmark.extra_info["sequences_per_s"] = BATCH / benchmark.stats.stats.median
