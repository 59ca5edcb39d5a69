"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.engines.reference import ReferenceEngine
from specverify.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.decoding import Decoder
    from specverify.engines import Engine
    from specverify.subject import Subject

__all__ = ["Fault", "unchanged"]


def unchanged(decoder: Decoder) -> Decoder:
    """The fault is around the decoder, not in it."""
    return decoder


def _as_it_is(engine: Engine) -> Engine:
    return engine


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault."""

    name: str
    stands_for: str
    """The class of public bug."""
    caught_by: tuple[str, ...]
    """Ids of checks that must fail on it, the one that is cheapest to ask first; others may fail, too."""
    apply: Callable[[Decoder], Decoder]
    """The decoder with one part of it changed."""
    around: Callable[[Engine], Engine] = _as_it_is
    """What an engine does to the decoder's answers."""

    def plant(self, subject: Subject) -> Subject:
        """The subject with the fault in it. Raises `PlanError` where it is not the reference decoder that is under test."""
        if subject.decoder is None or not isinstance(subject.engine, ReferenceEngine):
            msg = f"fault '{self.name}' can be planted in the reference decoder alone, not in {subject.engine.name}"
            raise PlanError(msg)
        decoder = self.apply(subject.decoder)
        return replace(subject, decoder=decoder, engine=self.around(replace(subject.engine, decoder=decoder)))
