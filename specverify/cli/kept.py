"""What a long measurement has so far, in one file that is rewritten as it goes, so that the same command goes on from there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol, TypeVar

from specverify.certify import fingerprints
from specverify.cli.store import run_key
from specverify.codec import dump, load_as, read_text, write_text_atomically
from specverify.errors import OutputError

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.plan import Plan
    from specverify.subject import Subject

__all__ = ["Keyed", "measurement_key", "read_kept", "write_kept"]


class Keyed(Protocol):
    """A record that knows the measurement that it belongs to."""

    @property
    def key(self) -> str:
        """Of `measurement_key`."""


Record = TypeVar("Record", bound=Keyed)


def measurement_key(subject: Subject, plan: Plan, **settings: object) -> str:
    """Of all that decides what is measured; how many times is no part of it."""
    return f"{run_key(subject, plan, fingerprints(subject), fault='')} {json.dumps(settings, sort_keys=True)}"


def read_kept(path: Path | None, nothing: Record) -> Record:
    """What the file holds of the measurement of `nothing`, which is returned where there is no file.

    Raises `OutputError` for the file of another measurement: hours of it must not be overwritten.
    """
    if path is None or not path.exists():
        return nothing
    kept = load_as(type(nothing), read_text(path, "the measurement", OutputError), source=str(path))
    if kept.key != nothing.key:
        msg = f"{path} is of another measurement (other models, plan, options or versions); give another --out"
        raise OutputError(msg)
    return kept


def write_kept(path: Path | None, kept: Keyed) -> None:
    """Replace the file, if there is to be one; raises `OutputError` when it can't be written."""
    if path is not None:
        write_text_atomically(path, dump(kept))
