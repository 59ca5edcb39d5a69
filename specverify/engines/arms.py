"""What stands around an engine under test: two arms as one engine, the target alone, and every way to break as one error."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.engines import Capability
from specverify.errors import PlanError, RequestRefused, SpecverifyError, SubjectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.engines import Engine, Metered, Rescoring, Telling, Told
    from specverify.records import DecodeCounters, DecodeRequest, DecodeTrace

__all__ = ["Guarded", "TargetOnly", "TwoArms"]


@dataclass(frozen=True)
class Guarded:
    """An engine that breaks with a `SubjectError` which names the request, whatever it raises, and answers all or breaks.

    A refusal stays one, as a `UsageError`; what was refused before needn't be asked again.
    """

    inner: Engine
    refused: frozenset[str] = frozenset()
    """Parameters that the engine names as its own, and refused aloud when they were asked."""

    @property
    def name(self) -> str:
        """The engine's."""
        return self.inner.name

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The engine's."""
        return self.inner.capabilities

    @property
    def parameters(self) -> frozenset[str]:
        """The engine's, but for what it refused."""
        return self.inner.parameters - self.refused

    def counters(self) -> DecodeCounters:
        """The engine's, where it has them."""
        metered: Metered = self.inner  # type: ignore[assignment]  # its capability says so
        return metered.counters()

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Traces in the order of the requests and their samples."""
        with self._breaking_as_findings(requests):
            traces = list(self.inner.decode(requests))
        yield from self._in_order(requests, traces)

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """The engine's answer as text, where it has them."""
        telling: Telling = self.inner  # type: ignore[assignment]  # its capability says so
        with self._breaking_as_findings([request]):
            return telling.tell(request, stream=stream, schema=schema)

    def prompt_logprobs(self, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
        """Its laws of texts, where it tells them."""
        rescoring: Rescoring = self.inner  # type: ignore[assignment]  # its capability says so
        with self._breaking_as_findings([trace.request for trace in traces]):
            return iter(list(rescoring.prompt_logprobs(traces, top=top)))

    @contextlib.contextmanager
    def _breaking_as_findings(self, requests: Sequence[DecodeRequest]) -> Iterator[None]:
        try:
            yield
        except RequestRefused as error:
            raise PlanError(str(error)) from error
        except SpecverifyError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            msg = f"{self.name} raised {type(error).__name__} while it answered {_named(requests)}: {said}"
            raise SubjectError(msg) from error

    def _in_order(self, requests: Sequence[DecodeRequest], traces: Sequence[DecodeTrace]) -> Iterator[DecodeTrace]:
        answers: dict[tuple[DecodeRequest, int], list[DecodeTrace]] = defaultdict(list)
        for trace in traces:
            answers[trace.request, trace.sample].append(trace)
        wanted = [(request, sample) for request in requests for sample in range(request.num_samples)]
        for key in wanted:
            if not answers[key]:
                msg = f"{self.name} gave no answer to {key[0].id}, sample {key[1]}, among {_named(requests)}"
                raise SubjectError(msg)
            yield answers[key].pop(0)
        if len(traces) > len(wanted):
            msg = f"{self.name} gave {len(traces)} answers where {len(wanted)} were asked: {_named(requests)}"
            raise SubjectError(msg)


def _named(requests: Sequence[DecodeRequest]) -> str:
    if not requests:
        return "no request"
    first = requests[0]
    ids = f"{first.id} (prompt {list(first.prompt_ids)[:40]}, seed {first.seed})"
    return ids if len(requests) == 1 else f"{len(requests)} requests, the first {ids}"


@dataclass(frozen=True)
class TargetOnly:
    """The OFF arm of an engine, or an engine that was started without a draft: never speculates, whatever is asked."""

    inner: Engine

    @property
    def name(self) -> str:
        """The engine's, and that it is OFF."""
        return f"{self.inner.name} without speculation"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The engine's; nothing is drafted, so nothing is counted."""
        return self.inner.capabilities - {Capability.STEPS, Capability.COUNTERS}

    @property
    def parameters(self) -> frozenset[str]:
        """The engine's."""
        return self.inner.parameters

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """The answers of the target alone, under the requests as they were asked."""
        alone = [replace(request, speculation=False) for request in requests]
        answers = self.inner.decode(alone)
        asked = (request for request in requests for _ in range(request.num_samples))
        for request, trace in zip(asked, answers, strict=True):
            yield replace(trace, request=request, steps=())

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """The target alone, as text."""
        telling: Telling = self.inner  # type: ignore[assignment]  # its capability says so
        return telling.tell(replace(request, speculation=False), stream=stream, schema=schema)


@dataclass(frozen=True)
class TwoArms:
    """Requests with speculation go to one engine, those without to another."""

    on: Engine
    off: Engine

    @property
    def name(self) -> str:
        """Of what is under test."""
        return self.on.name

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Of what is under test, with the switch."""
        return self.on.capabilities | {Capability.SPECULATION_SWITCH}

    @property
    def parameters(self) -> frozenset[str]:
        """What both honour."""
        return self.on.parameters & self.off.parameters

    def counters(self) -> DecodeCounters:
        """Of what is under test, where it has them."""
        metered: Metered = self.on  # type: ignore[assignment]  # its capability says so
        return metered.counters()

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Traces in the order of the requests, whichever arm answered."""
        arms = {
            speculation: self._answers(engine, [one for one in requests if one.speculation is speculation])
            for speculation, engine in ((True, self.on), (False, self.off))
        }
        for request in requests:
            for _ in range(request.num_samples):
                yield next(arms[request.speculation])

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """As text, from the arm that is asked."""
        telling: Telling = self.on if request.speculation else self.off  # type: ignore[assignment]  # its capability says so
        return telling.tell(request, stream=stream, schema=schema)

    def _answers(self, engine: Engine, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        return iter(list(engine.decode(requests)) if requests else ())
