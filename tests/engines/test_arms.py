"""What stands around an engine: two arms as one, and every way to break as one error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from specverify.engines import Capability
from specverify.engines.arms import Guarded, TargetOnly, TwoArms
from specverify.engines.fake import FakeEngine, fake_engine
from specverify.errors import PlanError, RequestRefused, SubjectError
from specverify.records import DecodeRequest, SamplingParams

REQUESTS = [
    DecodeRequest(id=f"r{number}", prompt_ids=(1, number), params=SamplingParams(max_new_tokens=5), seed=number)
    for number in range(4)
]


@dataclass
class Strange:
    """Answers, and then something happens."""

    inner: FakeEngine
    happens: object
    name: str = "strange"

    @property
    def capabilities(self):
        return self.inner.capabilities

    @property
    def parameters(self):
        return self.inner.parameters

    def decode(self, requests):
        traces = list(self.inner.decode(requests))
        if isinstance(self.happens, Exception):
            raise self.happens
        yield from self.happens(traces)


def test_two_arms_keep_the_order_of_requests():
    """Whichever arm answers; without speculation there are no drafts."""
    asked = [replace(one, speculation=number % 2 == 0) for number, one in enumerate(REQUESTS)]
    traces = list(TwoArms(fake_engine(), TargetOnly(fake_engine())).decode(asked))
    assert [trace.request for trace in traces] == asked
    assert [bool(trace.steps) for trace in traces] == [True, False, True, False]


def test_target_alone_answers_under_the_request_as_it_was_asked():
    """So that a check finds its own requests again."""
    engine = TargetOnly(fake_engine())
    (trace,) = engine.decode(REQUESTS[:1])
    assert trace.request is REQUESTS[0]
    assert Capability.STEPS not in engine.capabilities


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (IndexError("slot 3"), "raised IndexError while it answered 4 requests, the first r0 .*: slot 3"),
        (lambda traces: traces[:-1], "gave no answer to r3, sample 0"),
        (lambda traces: [*traces, traces[0]], "gave 5 answers where 4 were asked"),
    ],
)
def test_whatever_breaks_is_a_finding_with_its_request(happens, said):
    """Neither a traceback nor a shorter list."""
    with pytest.raises(SubjectError, match=said):
        list(Guarded(Strange(fake_engine(), happens)).decode(REQUESTS))


def test_answers_in_another_order_are_put_back():
    """A server may finish them in any."""
    guarded = Guarded(Strange(fake_engine(), lambda traces: traces[::-1]))
    assert [trace.request for trace in guarded.decode(REQUESTS)] == REQUESTS


def test_a_refusal_stays_a_refusal():
    """Refused is fine, ignored is not."""
    with pytest.raises(PlanError, match="no penalties here"):
        list(Guarded(Strange(fake_engine(), RequestRefused("no penalties here"))).decode(REQUESTS))
    assert "top_k" not in Guarded(fake_engine(), frozenset({"top_k"})).parameters
