"""Two unseeded answers that are one text: chance, or not, as the target's own law says."""

from __future__ import annotations

import numpy as np
import pytest

from specverify.conformance.state import _wrong_doubles
from specverify.records import DecodeRequest, DecodeTrace, FinishReason
from specverify.scoring import ScoredTraces


def asked_twice(length: int, prob: float, *, seeded: bool = False) -> ScoredTraces:
    requests = [DecodeRequest(id=name, prompt_ids=(1,), seeded=seeded) for name in ("r", "r, double")]
    traces = [
        DecodeTrace(request=one, sample=0, token_ids=tuple(range(length)), finish=FinishReason.LENGTH)
        for one in requests
    ]
    columns = {"trace": np.repeat([0.0, 1.0], length), "prob": np.full(2 * length, prob)}
    return ScoredTraces(traces, columns | {"token": columns["prob"]})


@pytest.mark.parametrize(
    ("length", "prob", "number"),
    [(16, 0.1, 1), (16, 0.9, 0), (12, 0.1, 0), (13, 0.1, 1), (1, 0.0, 1)],
)
def test_a_double_is_a_finding_where_the_law_makes_it_no_accident(length, prob, number):
    """At a rate of 1e-6 and two answers: 13 tokens of 0.1 each, and not 12, nor 16 that are nearly certain."""
    assert len(_wrong_doubles(asked_twice(length, prob), rate=1e-6)) == number


def test_answers_with_a_seed_are_for_another_cell():
    """The same seed says the same."""
    assert not _wrong_doubles(asked_twice(16, 0.1, seeded=True), rate=1e-6)
