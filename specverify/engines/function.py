"""The smallest engine of a user: one function from prompt ids to lists of ids.

def decode(prompt_ids, n, max_new_tokens, seed, **sampling):
    return [generate(prompt_ids, max_new_tokens, seed + i, **sampling) for i in range(n)]
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.finish import finish_of
from specverify.errors import SpecverifyError, SubjectError
from specverify.records import DecodeCounters, DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.records import DecodeRequest

__all__ = ["FunctionEngine", "decodes"]


def decodes(function: Callable[..., Any]) -> bool:
    """Whether its parameters say that it decodes: the first is the prompt."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "prompt_ids"
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class FunctionEngine:
    """A function `(prompt_ids, n, max_new_tokens, seed, **sampling) -> list[list[int]]`.

    `sampling` are the fields of `SamplingParams` by their names; one that the function doesn't take is not asked of it. An attribute
    `counters` of the function, itself a function, tells what was drafted since the start; without it nobody knows.
    Raises `SubjectError` for an answer of another type, or where the function raises.
    """

    function: Callable[..., Any]
    off: Callable[..., Any] | None = None
    """The same without speculation."""
    name: str = "function"

    @cached_property
    def _taken(self) -> frozenset[str] | None:
        """Keyword arguments that it names; None where it takes all of them."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            return None
        return frozenset(each.name for each in parameters)

    @cached_property
    def capabilities(self) -> frozenset[Capability]:
        """Seeds, where it takes one; the other arm, where there is a function for it. Stop strings need a text, so never."""
        found = {Capability.SEED} if self._taken is None or "seed" in self._taken else set()
        if self._meter is not None:
            found.add(Capability.COUNTERS)
        if self.off is not None:
            found.add(Capability.SPECULATION_SWITCH)
        return frozenset(found)

    @property
    def _meter(self) -> Callable[[], Any] | None:
        meter = getattr(self.function, "counters", None)
        return meter if callable(meter) else None

    def counters(self) -> DecodeCounters:
        """What the function's own attribute `counters` returns: `DecodeCounters`, or a dict of its fields."""
        told: Any = self._meter() if self._meter is not None else None
        try:
            counted = told if isinstance(told, DecodeCounters) else DecodeCounters(**told)
        except TypeError as error:
            fields = ", ".join(field.name for field in dataclasses.fields(DecodeCounters))
            msg = f"{self.name}.counters() returned {str(told)[:60]!r}; a dict of {fields} was wanted"
            raise SubjectError(msg) from error
        return dataclasses.replace(counted, num_accepted_tokens_per_pos=tuple(counted.num_accepted_tokens_per_pos))

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Those that it names; all with `**sampling`."""
        return ALL_PARAMETERS if self._taken is None else ALL_PARAMETERS & self._taken

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """One call a request, in order."""
        for request in requests:
            for sample, token_ids in enumerate(self._answer(request)):
                yield DecodeTrace(
                    request=request, sample=sample, token_ids=token_ids, finish=finish_of(token_ids, request.params)
                )

    def _answer(self, request: DecodeRequest) -> list[tuple[int, ...]]:
        function = self.function if request.speculation or self.off is None else self.off
        arguments = {
            field.name: getattr(request.params, field.name)
            for field in dataclasses.fields(request.params)
            if field.name != "stop_strings"
        }
        arguments |= {"n": request.num_samples, "seed": request.seed}
        if self._taken is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._taken}
        try:
            answer = function(list(request.prompt_ids), **arguments)
        except SpecverifyError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            msg = f"{self.name} raised {type(error).__name__} for {request.id}: {said}"
            raise SubjectError(msg) from error
        return self._checked(answer, request)

    def _checked(self, answer: Any, request: DecodeRequest) -> list[tuple[int, ...]]:  # noqa: ANN401 - a user's answer
        """The ids, or one sentence about what came instead."""
        wanted = f"a list of {request.num_samples} lists of ints was wanted"
        if not isinstance(answer, (list, tuple)):
            msg = f"{self.name} returned a {type(answer).__name__} for {request.id}; {wanted}"
            raise SubjectError(msg)
        if len(answer) != request.num_samples:
            msg = f"{self.name} returned {len(answer)} texts for {request.id}; {wanted}"
            raise SubjectError(msg)
        texts = []
        for text in answer:
            ids = text.tolist() if hasattr(text, "tolist") else text
            if not isinstance(ids, (list, tuple)) or not all(_is_id(token) for token in ids):
                msg = f"{self.name} returned {str(text)[:60]!r} as one text of {request.id}; {wanted}"
                raise SubjectError(msg)
            texts.append(tuple(int(token) for token in ids))
        return texts


def _is_id(token: object) -> bool:
    return hasattr(token, "__index__") and not isinstance(token, bool)
