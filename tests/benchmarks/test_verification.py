"""Verification steps against the naive one, the exponential limit and the copy rate, in turns of one run.

A gate holds a ratio; its margin is for cores that others use, too. See design/performance.md for what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from specverify.bench.verification import BASELINE, Workload, verification_suite

if TYPE_CHECKING:
    from specverify.bench import Comparison

LEAST_OVER_NAIVE, LEAST_OVER_EXPONENTIAL = 7.0, 0.5
REPEATS = 15


def named(found: tuple[Comparison, ...], name: str, baseline: str = BASELINE) -> Comparison:
    """The comparison of that contender."""
    return next(each for each in found if (each.name, each.baseline) == (name, baseline))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50_257, 128_256])
def test_fused_step(benchmark, vocab_size, dtype):
    """At least seven times the naive step where every row is read, and within twice the exponential limit in float32."""
    work = Workload(vocab_size=vocab_size, dtype=dtype)
    found, _ = benchmark.pedantic(verification_suite, (work,), {"repeats": REPEATS}, rounds=1)
    naive = named(found, "fused, all accepted")
    limit = named(found, "fused, all accepted", "exponential limit")
    benchmark.extra_info["comparisons"] = [
        {"name": each.name, "baseline": each.baseline, "ratio": each.ratio.estimate, "rows_per_s": each.units_per_s}
        for each in found
    ]
    assert naive.ratio.high >= LEAST_OVER_NAIVE, f"{naive.ratio} of the naive step; wanted {LEAST_OVER_NAIVE}"
    if dtype is torch.float32:
        assert limit.ratio.high >= LEAST_OVER_EXPONENTIAL, f"{limit.ratio} of the exponential limit"
