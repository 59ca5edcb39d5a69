"""How fast verification and decoding are, as ratios to a baseline taken in turns; see Note [Timing].

`verification` times verification steps on logits, of ours and of the peers that are installed; `decoding` times whole
decodes with a pair. Both give `Comparison`s; `report` keeps them with their machine, and holds two records together.
"""

from __future__ import annotations

from specverify.bench.report import BenchReport, Change, Comparison, compared
from specverify.bench.suites import SUITES, Sizes, bench

__all__ = ["SUITES", "BenchReport", "Change", "Comparison", "Sizes", "bench", "compared"]
