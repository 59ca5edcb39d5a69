"""An engine in bfloat16, judged by the same models in float32: rounding has no direction, so nothing may call it a fault."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from specverify.checks.check import asked, sampling
from specverify.checks.evidence import ORDERS, e_process
from specverify.cli.invocation import Invocation
from specverify.cli.setup import make_subject
from specverify.scoring import ScoredTraces, score
from specverify.statistics.uniformity import kolmogorov_smirnov

NUM_TOKENS = int(os.environ.get("SPECVERIFY_BFLOAT16_TOKENS", "200000"))


@pytest.mark.nightly
def test_bfloat16_is_no_fault():
    """The embedded pair: no proof, no suspicion, and no p-value below a millionth."""
    judging, running = (Invocation(budget="quick", dtype=dtype) for dtype in ("float32", "bfloat16"))
    plan = replace(judging.plan(), max_new_tokens=32)
    judge = make_subject(judging, judging.sources(), plan)
    engine = make_subject(running, running.sources(), replace(running.plan(), max_new_tokens=32)).engine
    scored, number = ScoredTraces(), 0
    while len(scored) < NUM_TOKENS:
        requests = asked(f"bfloat16/{number}", plan, judge.prompts, sampling(judge, plan), num_samples=2)
        traces = list(engine.decode(requests))
        scored = scored.merge(score(traces, target=judge.target, draft=judge.draft, stages=True, workers=judge.workers))
        number += 1
    process = e_process(scored)
    p_values = {order: kolmogorov_smirnov(scored[order]).p_value for order in ORDERS}
    leading = sorted(process.components.items(), key=lambda one: -one[1])[:6]
    said = (
        f"{len(scored):,} tokens, log10 e = {process.log10_e:.2f}, most {process.log10_max:.2f}, {leading}, {p_values}"
    )
    print(said)  # noqa: T201 - the figures of a night
    assert process.log10_max < 6, said
    assert min(p_values.values()) > 1e-6, said
    assert np.isfinite(process.path).all()
