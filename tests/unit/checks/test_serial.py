"""Values that know the one before them are seen; independent ones are not suspected."""

from __future__ import annotations

import numpy as np

from specverify.checks.serial import serial_test
from specverify.plan import Plan
from specverify.scoring import ScoredTraces

PLAN = Plan()


def stream(values: np.ndarray, length: int = 10) -> ScoredTraces:
    """Texts of `length` tokens with these PIT values."""
    places = np.arange(len(values))
    columns = {"pit_id": values, "trace": places // length, "position": places % length}
    return ScoredTraces((), {name: column.astype(float) for name, column in columns.items()} | {"token": values})


def test_a_value_near_the_one_before_is_seen() -> None:
    """Uniform one by one, and every fourth is its predecessor, disturbed a little."""
    rng = np.random.default_rng(0)
    values = rng.random(4_000)
    values[3::4] = np.mod(values[2::4] + 0.05 * rng.standard_normal(1_000), 1)
    (test,) = serial_test(stream(values), PLAN, name="stream")
    assert test.p_value < 1e-9


def test_independent_values_are_not_suspected() -> None:
    """At 1 %, in 200 streams, at most 8 (a healthy test exceeds that once in ten thousand runs)."""
    rng = np.random.default_rng(1)
    tests = [serial_test(stream(rng.random(500)), PLAN, name="stream")[0] for _ in range(200)]
    assert sum(test.p_value <= 0.01 for test in tests) <= 8


def test_tokens_of_different_texts_are_not_compared() -> None:
    """Only neighbours within a text count, and one token has none."""
    (test,) = serial_test(stream(np.linspace(0, 1, 30), length=10), PLAN, name="stream")
    assert test.num_samples == 27
    assert serial_test(stream(np.linspace(0, 1, 30), length=1), PLAN, name="stream") == ()


def test_nothing_scored_is_no_test() -> None:
    """An empty stream."""
    assert serial_test(ScoredTraces(), PLAN, name="stream") == ()
