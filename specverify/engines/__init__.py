"""What is under test: anything that answers decode requests with traces."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.records import DecodeRequest, DecodeTrace

__all__ = ["Capability", "Engine"]


class Capability(StrEnum):
    """What an engine can be asked for; what it can't is NOT_RUN, never assumed."""

    SEED = "seed"
    """The same request gives the same tokens."""
    STEPS = "steps"
    """Traces carry their steps."""
    SPECULATION_SWITCH = "speculation_switch"
    """`speculation=False` is honoured."""
    STOP_STRINGS = "stop_strings"


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

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Answer every request with `num_samples` traces; requests handed over together are each other's neighbours."""
        ...
