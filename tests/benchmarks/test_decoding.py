"""The reference decoder against the target alone and transformers' assisted generation, in turns of one run."""

from __future__ import annotations

import pytest

from specverify.bench.decoding import assisted_suite, batch_suite
from specverify.cli.invocation import Invocation
from specverify.cli.setup import make_subject

LEAST_OF_TARGET_ALONE = 0.5


@pytest.fixture(scope="module")
def subject():
    """The embedded pair, as `specverify certify` puts it together."""
    invocation = Invocation(budget="quick")
    return make_subject(invocation, invocation.sources(), invocation.plan())


def test_batched_samples(benchmark, subject):
    """Certification draws at least half as many sequences as the target alone."""
    arguments = {"batch": 128, "repeats": 7}
    (found,) = benchmark.pedantic(batch_suite, (subject.decoder, subject.prompts[0].token_ids), arguments, rounds=1)
    benchmark.extra_info["ratio"] = found.ratio.estimate
    benchmark.extra_info["sequences_per_s"] = found.units_per_s
    assert found.ratio.high >= LEAST_OF_TARGET_ALONE, f"{found.ratio} of the target alone"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_assisted_generation(benchmark, subject, temperature):
    """Beside transformers' own loop on the same prompts; not gated, for the margin is small at temperature 0."""
    (found,) = benchmark.pedantic(assisted_suite, (subject,), {"temperature": temperature, "repeats": 5}, rounds=1)
    benchmark.extra_info["ratio"] = found.ratio.estimate
    benchmark.extra_info["tokens_per_s"] = found.units_per_s
