"""What is under test: anything that answers decode requests with traces."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from specverify.errors import PlanError
from specverify.records import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from specverify.records import DecodeCounters, DecodeRequest, DecodeTrace, FinishReason

__all__ = [
    "ALL_PARAMETERS",
    "Capability",
    "Engine",
    "EngineFactory",
    "EngineSettings",
    "Metered",
    "Rescoring",
    "Telling",
    "Told",
    "lacking_parts",
    "require_engine",
]


class Capability(StrEnum):
    """What an engine can be asked for; what it can't is NOT_RUN, never assumed."""

    SEED = "seed"
    """The same request gives the same tokens."""
    STEPS = "steps"
    """Traces carry their steps."""
    SPECULATION_SWITCH = "speculation_switch"
    """`speculation=False` is honoured."""
    STOP_STRINGS = "stop_strings"
    LOGPROBS = "logprobs"
    """Traces carry the log-probability that the engine itself reports of each token."""
    COUNTERS = "counters"
    """It counts its drafts and acceptances, and is `Metered`."""
    UNSEEDED = "unseeded"
    """`seeded=False` is honoured: randomness of its own."""
    STREAM = "stream"
    """It is `Telling`, and streams."""
    SCHEMA = "schema"
    """It is `Telling`, and holds a text to a JSON schema."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """It is `Rescoring`."""


ALL_PARAMETERS = frozenset(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in {"max_new_tokens", "stop_strings"}
)
"""The fields of `SamplingParams` that an engine may or may not honour."""


class Engine(Protocol):
    """Something that decodes; checks never know which."""

    @property
    def name(self) -> str:
        """What the certificate calls it."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can be asked for."""
        ...

    @property
    def parameters(self) -> frozenset[str]:
        """Fields of `SamplingParams` that it honours, out of `ALL_PARAMETERS`; another than its default is not asked."""
        ...

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Answer every request with `num_samples` traces; requests handed over together are each other's neighbours."""
        ...


class Metered(Protocol):
    """An engine with `Capability.COUNTERS`."""

    def counters(self) -> DecodeCounters:
        """What it has counted since it was opened: never reset, so take differences."""
        ...


@dataclass(frozen=True, kw_only=True)
class Told:
    """One answer as its user reads it: whole, or put together from what was streamed."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    pieces: tuple[str, ...] = ()
    """Of a stream, one a delta."""


class Telling(Protocol):
    """An engine with `Capability.STREAM` or `Capability.SCHEMA`."""

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """The first sample of a request, streamed or whole; `schema` is a JSON schema that its text obeys."""
        ...


class Rescoring(Protocol):
    """An engine with `Capability.PROMPT_LOGPROBS`."""

    def prompt_logprobs(self, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
        """Of each trace, for each of its tokens, its raw log-probability and those of the `top` likeliest ids there.

        Computed without speculation, from the text as it stands.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is made from."""

    target: Path
    """A folder in the Hugging Face layout."""
    draft: Path | None = None
    num_speculative_tokens: int = 3
    eos_token_ids: tuple[int, ...] = ()
    max_length: int = 256
    """Positions, prompt included."""
    max_batch_size: int = 16
    """Requests side by side."""
    url: str = ""
    """A server that runs already."""
    model: str = ""
    """Its name for the model."""
    serve: str = ""
    """Command that starts the server; `{port}`, `{target}` and `{draft}` are filled in."""
    options: tuple[tuple[str, str], ...] = ()
    """Further settings of one engine, by its own names."""


EngineFactory: TypeAlias = "Callable[[EngineSettings], AbstractContextManager[Engine]]"
"""Opens an engine; leaving the context ends its servers, whatever happened."""


def lacking_parts(given: object) -> list[str]:
    """What an `Engine` has and this has not."""
    return [part for part in ("decode", "capabilities", "parameters", "name") if not hasattr(given, part)]


def require_engine(given: object) -> None:
    """Raise `PlanError` for what can't be asked as an engine, such as the name of one."""
    if lacks := lacking_parts(given):
        msg = (
            f"engine={given!r:.80} is no engine (it lacks {', '.join(lacks)}); give an object that has them, not a name"
        )
        raise PlanError(msg)
