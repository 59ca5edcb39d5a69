"""The reproducibility check passes answers that depend on the request alone, and fails those that depend on more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.checks.reproducibility import drawn_otherwise, reproducibility
from specverify.choices import inverse_cdf
from specverify.drafting import NoDraft
from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.reference import ReferenceEngine
from specverify.faults import find_fault
from specverify.judge import judge
from specverify.plan import Plan
from specverify.records import FinishReason, Verdict
from tests.unit.checks.hashed import VOCAB_SIZE, answered, concluded, subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.engines import Engine
    from specverify.records import CheckResult, DecodeRequest, DecodeTrace

PLAN = Plan()


@dataclass(frozen=True)
class Asking:
    """An engine that asks another one something else than it was asked, and answers as if it had not."""

    inner: Engine
    change: Callable[[DecodeRequest], DecodeRequest]
    capabilities: frozenset[Capability] = frozenset(Capability)
    parameters: frozenset[str] = ALL_PARAMETERS
    name: str = "asking"

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """The inner engine's answers to changed requests, under the names of those that were asked."""
        for request in requests:
            for trace in self.inner.decode([self.change(request)]):
                yield replace(trace, request=request)


def judged(result: CheckResult) -> CheckResult:
    """Its tests held against the error budget."""
    return judge([result], PLAN.false_fail_rate)[0][0]


def asking(change: Callable[[DecodeRequest], DecodeRequest]) -> CheckResult:
    """The verdict on an engine that asks something else."""
    return judged(concluded(reproducibility, subject(engine=Asking(subject().engine, change)), PLAN))


def test_a_healthy_decoder_passes() -> None:
    """Alone, together, among others and again: the same tokens, and other seeds say other things."""
    result = judged(concluded(reproducibility, subject(), PLAN))
    assert result.verdict is Verdict.PASS, result.summary
    assert result.measurements["num_differing_requests"] == 0
    assert result.measurements["num_pairs_of_seeds"] > 0
    assert result.measurements["num_answers"] > 2 * result.measurements["num_requests"]
    same, other = result.plots[0].series
    assert sum(same.y) == result.measurements["num_answers"] - result.measurements["num_requests"]
    assert sum(other.y) == 0
    assert {"together", "among others", "again"} <= set(same.x)


def test_each_arm_is_asked_and_not_recalled() -> None:
    """No two rounds are equal, so a store of rounds already answered can't answer for the engine."""
    rounds = [tuple(requests) for requests in reproducibility.rounds(subject(), PLAN)]
    assert len(set(rounds)) == len(rounds)
    neighbours = next(requests for requests in rounds if len(requests) == max(map(len, rounds)))
    assert any(request.params.greedy for request in neighbours)
    assert any(request.params.max_new_tokens == 1 for request in neighbours)


def test_random_numbers_by_the_place_in_the_batch_fail() -> None:
    """The planted fault: what a request draws depends on its row."""
    decoder = subject().decoder
    assert decoder is not None
    result = judged(concluded(reproducibility, subject(find_fault("seed-by-batch-place").apply(decoder)), PLAN))
    assert result.verdict is Verdict.FAIL
    assert "probability" in result.findings[0].text
    assert sum(result.plots[0].series[1].y) > 0


def test_an_engine_that_forgets_the_seed_fails() -> None:
    """Fresh randomness for every call: no answer comes twice."""
    calls = count()
    assert asking(lambda request: replace(request, seed=next(calls))).verdict is Verdict.FAIL


def test_an_engine_that_ignores_the_seed_fails() -> None:
    """The same randomness whatever the seed: answers repeat, but different seeds agree, and that is not chance."""
    result = asking(lambda request: replace(request, seed=5))
    assert result.verdict is Verdict.FAIL
    assert result.measurements["num_differing_requests"] == 0
    assert "different seeds" in result.summary


def test_a_finish_that_differs_fails_without_statistics() -> None:
    """Equal tokens that end for different reasons can't be rounding."""
    scored = answered(reproducibility, subject(), PLAN)
    broken = replace(scored.traces[-1], finish=FinishReason.EOS)
    result = reproducibility.conclude(subject(), PLAN, replace(scored, traces=(*scored.traces[:-1], broken)))
    assert result.verdict is Verdict.FAIL
    assert "end as" in result.findings[0].text


def test_low_precision_is_inconclusive_where_answers_differ() -> None:
    """Rounding that is large enough to explain the differences is no fault, and no proof of the claim either."""
    result = judged(concluded(reproducibility, subject(rounding=0.05), PLAN))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.measurements["num_differing_requests"] > 0


def test_the_rounding_of_float32_alone_raises_no_alarm() -> None:
    """Logits that move in their last bits with the batch's shape."""
    assert judged(concluded(reproducibility, subject(rounding=1e-6), PLAN)).verdict is Verdict.PASS


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_single_fault_is_told_from_rounding(rounding: float) -> None:
    """Where nothing rounds, one differing request of all fails; where rounding was measured, it is reported."""
    asked_of = subject(rounding=rounding)
    scored = answered(reproducibility, asked_of, PLAN)
    last = scored.traces[-1]
    other = replace(last, token_ids=((last.token_ids[0] + 1) % VOCAB_SIZE, *last.token_ids[1:]))
    result = judged(reproducibility.conclude(asked_of, PLAN, replace(scored, traces=(*scored.traces[:-1], other))))
    assert (result.verdict is Verdict.FAIL) == (rounding == 0)
    assert result.measurements["num_differing_requests"] == 1
    assert result.findings


def test_an_engine_without_seeds_is_not_run() -> None:
    """What can't be asked is never assumed."""
    engine = Asking(subject().engine, lambda request: request, capabilities=frozenset({Capability.STEPS}))
    asked_of = subject(engine=engine)
    assert list(reproducibility.rounds(asked_of, PLAN)) == []
    assert concluded(reproducibility, asked_of, PLAN).verdict is Verdict.NOT_RUN


def test_nothing_drafted_is_inconclusive() -> None:
    """Target-only answers that repeat show nothing about speculation."""
    decoder = subject().decoder
    assert decoder is not None
    silent = subject(engine=ReferenceEngine(replace(decoder, drafter=NoDraft(VOCAB_SIZE))))
    assert concluded(reproducibility, silent, PLAN).verdict is Verdict.INCONCLUSIVE


def test_drawn_otherwise_is_the_share_of_uniforms_that_draw_another_id() -> None:
    """Against a fine grid of uniforms through the inverse CDF itself."""
    generator = torch.Generator().manual_seed(3)
    first, second = torch.rand(2, 4, 9, generator=generator, dtype=torch.float64)
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for row in range(4):
        drawn = [inverse_cdf(law[row].expand(len(grid), -1), grid) for law in (first, second)]
        share = (drawn[0] != drawn[1]).double().mean()
        assert abs(float(drawn_otherwise(first[row : row + 1], second[row : row + 1])) - float(share)) < 1e-3
    assert float(drawn_otherwise(first, first).max()) < 1e-12
