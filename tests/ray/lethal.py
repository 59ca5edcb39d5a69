"""A subject whose process is killed once, in the middle of its work: what a lost machine looks like to the others."""

from __future__ import annotations

import dataclasses
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specverify.cli.invocation import Invocation
from specverify.door import subject_of
from specverify.engines.reference import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.context import Row
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.subject import Subject


@dataclass(frozen=True)
class Lethal(ReferenceEngine):
    """Kills its own process at a batch, if nobody has before; or at every batch."""

    grave: str = ""
    always: bool = False

    def decode_batch(self, batch: Sequence[Row]) -> list[DecodeTrace]:
        """The traces, if it lives to give them."""
        traces = super().decode_batch(batch)
        place = Path(self.grave)
        if self.always or not place.exists():
            place.write_text("killed after it had decoded, before it could say what")
            os.kill(os.getpid(), signal.SIGKILL)
        return traces


def healthy(plan: Plan) -> Subject:
    """The embedded pair."""
    return subject_of(Invocation(), plan)


def lethal(plan: Plan, grave: str, *, always: bool = False) -> Subject:
    """The same, in a process that dies."""
    subject = healthy(plan)
    assert isinstance(subject.engine, ReferenceEngine)
    parts = {each.name: getattr(subject.engine, each.name) for each in dataclasses.fields(subject.engine)}
    return dataclasses.replace(subject, engine=Lethal(**parts, grave=grave, always=always))
