"""What a planted fault of a whole engine is: the sound fake, asked, answering or telling otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from specverify.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from specverify.engines import Capability, Told
    from specverify.engines.fake import FakeEngine
    from specverify.records import DecodeCounters, DecodeRequest, DecodeTrace, FinishReason

__all__ = ["EngineFault", "Faulty", "asked_otherwise", "cut", "each", "fault", "sound", "tells", "under", "with_params"]

Requests: TypeAlias = "Sequence[DecodeRequest]"
Traces: TypeAlias = "Iterable[DecodeTrace]"


@dataclass
class Faulty:
    """A fake that answers, counts or tells otherwise."""

    inner: FakeEngine
    answer: Callable[[Faulty, Requests], Traces]
    count: Callable[[DecodeCounters], DecodeCounters]
    say: Callable[[Faulty, DecodeRequest, bool, str], Told]
    memory: dict[str, Any] = field(default_factory=dict)
    name: str = "faulty fake"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """It claims all that the sound one has."""
        return self.inner.capabilities

    @property
    def parameters(self) -> frozenset[str]:
        """And honours, so it says, as much."""
        return self.inner.parameters

    def counters(self) -> DecodeCounters:
        """As this fault counts."""
        return self.count(self.inner.counters())

    def decode(self, requests: Requests) -> Iterator[DecodeTrace]:
        """As this fault answers."""
        yield from self.answer(self, requests)

    def prompt_logprobs(self, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
        """The sound one's: it is asked without speculation."""
        return self.inner.prompt_logprobs(traces, top=top)

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """As this fault tells."""
        return self.say(self, request, stream, schema)


def tells(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as a fault takes it
    """As the sound one."""
    return engine.inner.tell(request, stream=stream, schema=schema)


@dataclass(frozen=True, kw_only=True)
class EngineFault:
    """One planted fault of an engine."""

    name: str
    stands_for: str
    """The class of public bug."""
    caught_by: str
    """The cell that must catch it."""
    answer: Callable[[Faulty, Requests], Traces]
    count: Callable[[DecodeCounters], DecodeCounters] = lambda counters: counters
    say: Callable[[Faulty, DecodeRequest, bool, str], Told] = tells
    verdict: Verdict = Verdict.FAIL
    """What the cell must say: INCONCLUSIVE of an engine that does nothing."""

    def plant(self, engine: FakeEngine) -> Faulty:
        """The fake with the fault in it."""
        return Faulty(engine, self.answer, self.count, self.say)


def sound(engine: Faulty, requests: Requests) -> Traces:
    """As the sound one."""
    return engine.inner.decode(requests)


def under(requests: Requests, traces: Traces) -> Iterator[DecodeTrace]:
    """Answers to changed requests, handed out as answers to the ones that were asked."""
    asked = (request for request in requests for _ in range(request.num_samples))
    for request, trace in zip(asked, traces, strict=True):
        yield replace(trace, request=request)


def asked_otherwise(change: Callable[[DecodeRequest], DecodeRequest]) -> Callable[[Faulty, Requests], Traces]:
    """Each request is changed before it is answered."""
    return lambda engine, requests: under(requests, engine.inner.decode([change(one) for one in requests]))


def with_params(**changes: Any) -> Callable[[Faulty, Requests], Traces]:  # noqa: ANN401 - fields of SamplingParams
    """These fields of every request are set to what they must not be."""
    return asked_otherwise(lambda one: replace(one, params=replace(one.params, **changes)))


def each(change: Callable[[Faulty, DecodeTrace], DecodeTrace]) -> Callable[[Faulty, Requests], Traces]:
    """Each answer is changed."""
    return lambda engine, requests: (change(engine, trace) for trace in engine.inner.decode(requests))


def cut(trace: DecodeTrace, length: int, finish: FinishReason) -> DecodeTrace:
    """The first tokens of a longer answer; its steps no longer add up, so it tells none."""
    return replace(trace, token_ids=trace.token_ids[:length], logprobs=trace.logprobs[:length], steps=(), finish=finish)


def fault(
    name: str,
    caught_by: str,
    answer: Callable[[Faulty, Requests], Traces],
    stands_for: str,
    *,
    count: Callable[[DecodeCounters], DecodeCounters] = lambda counters: counters,
    say: Callable[[Faulty, DecodeRequest, bool, str], Told] = tells,
    verdict: Verdict = Verdict.FAIL,
) -> EngineFault:
    """One row of a table of faults."""
    return EngineFault(
        name=name, stands_for=stands_for, caught_by=caught_by, answer=answer, count=count, say=say, verdict=verdict
    )
