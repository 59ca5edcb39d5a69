"""A greedy token that is not the target's first choice: a finding, unless the engine says it without speculation, too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from specverify.certify import run_check
from specverify.checks.noise import MOST_OF_ENGINE
from specverify.conformance.asking import Asking, Seen, cell, wrong_greedy_tokens
from specverify.conformance.cells import engine_plan
from specverify.judge import judge
from specverify.models.hashed import HashedModel
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, StatisticalTest, Verdict
from specverify.scoring import ScoredTraces, score
from tests.unit.checks.hashed import subject

PARAMS = SamplingParams(temperature=0, max_new_tokens=1)


@dataclass
class Says:
    """The same token, whatever is asked."""

    token: int
    name: str = "says"
    capabilities = frozenset()
    parameters = frozenset()

    def decode(self, requests):
        for one in requests:
            assert not one.speculation
            yield DecodeTrace(request=one, sample=0, token_ids=(self.token,), finish=FinishReason.LENGTH)


def runner_up(least: float, most: float) -> tuple[tuple[int, ...], int, int]:
    """A prompt whose first choice leads by so much, with both tokens."""
    for first in range(24):
        for second in range(24):
            row = HashedModel().logits([(first, second)])[0, -1]
            best, next_ = row.topk(2).indices.tolist()
            if least < float(row[best] - row[next_]) < most:
                return (first, second), best, next_
    raise AssertionError


@pytest.mark.parametrize(
    ("gaps", "alone", "verdict"),
    [
        ((0.0, MOST_OF_ENGINE), "the same", Verdict.PASS),
        ((0.0, MOST_OF_ENGINE), "the first choice", Verdict.FAIL),
        ((MOST_OF_ENGINE, 9.0), "the same", Verdict.FAIL),
    ],
)
def test_what_is_said_without_speculation_too_is_numerics_as_far_as_these_go(gaps, alone, verdict):
    """OpenVINO at a near tie of 0.0005 logits is no finding; another token far off is, whoever says it."""
    prompt, best, token = runner_up(*gaps)
    request = DecodeRequest(id="r", prompt_ids=prompt, params=PARAMS)
    trace = DecodeTrace(request=request, sample=0, token_ids=(token,), finish=FinishReason.LENGTH)
    asking = Asking(subject(engine=Says(token if alone == "the same" else best)), engine_plan(), "cell")

    def look(asking):
        scored = score([trace], target=asking.subject.target)
        return Seen(summary="right", wrong=wrong_greedy_tokens(asking, scored, what="here"))

    result = cell("cell", "claim", look).conclude(asking.subject, asking.plan, ScoredTraces())
    assert result.verdict is verdict
    assert (result.summary == "right") is (verdict is Verdict.PASS)
    assert len(result.findings) == 1


@pytest.mark.parametrize(
    ("log10_e", "verdict"), [(2.9, Verdict.PASS), (3.1, Verdict.INCONCLUSIVE), (9.0, Verdict.FAIL)]
)
def test_suspicion_of_a_cell_is_no_pass(log10_e, verdict):
    """More than nothing and less than proof is not decided; proof fails."""
    test = StatisticalTest(
        name="law", statistic=log10_e, log10_e=log10_e, allowed=math.nan, failed=False, num_samples=9
    )
    look = cell("c", "a claim", lambda _: Seen(summary="seen", tests=(test,), advice="look here"))
    plan = engine_plan()
    (result,), _ = judge([run_check(look, subject(engine=Says(1)), plan)], plan.false_fail_rate)
    assert result.verdict is verdict
    assert ("suspect: evidence 10^3.1 to 1, law" in result.summary) == (log10_e == 3.1)
    assert result.advice == "look here"
    assert result.summary.count("evidence") == (verdict is not Verdict.PASS)
