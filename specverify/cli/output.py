"""What a run leaves behind: certificate, report, JUnit and summary, all of them or none."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from specverify.cli.store import CHECKPOINT
from specverify.codec import write_text_atomically
from specverify.errors import OutputError
from specverify.redaction import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from specverify.records import Certificate

__all__ = [
    "CERTIFICATE",
    "PREVIOUS",
    "last_of",
    "move_aside",
    "render",
    "require_other_folder",
    "reserved",
    "set_aside",
    "write_all",
]

CERTIFICATE = "certificate.json"
"""Put in place last: where it is, the others are."""
PREVIOUS = "previous"
"""The folder, beside a run's files, of those that stood there when a run began that did not end in a certificate."""
_MOST_LOOKED_AT = 64 * 1024 * 1024
"""Bytes of a certificate that was there before, for our name in it."""
_WRITTEN = ("report.html", "junit.xml", "summary.md", CERTIFICATE)


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make the folder and hold it for one run; a run that leaves nothing takes its empty folder, and those made for it, away again.

    Raises `OutputError`, before the run rather than after it, if nothing can be written there or another run holds it.
    """
    from filelock import FileLock, Timeout

    if folder.exists() and not folder.is_dir():
        msg = f"{folder} is a file, and the certificate needs a folder; give another --out"
        raise OutputError(msg)
    _require_room(folder)
    made = [each for each in folder.parents if not each.exists()]
    probe, lock = folder / f".probe-{secrets.token_hex(4)}", folder / ".lock"
    try:
        write_text_atomically(probe, "")
        probe.unlink(missing_ok=True)
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout as error:
        msg = f"another run is writing to {folder}; wait for it, or give this one another folder with --out"
        raise OutputError(msg) from error
    except OSError as error:  # of the lock: all else in a run has a sentence of its own
        if error.filename is None or os.path.realpath(error.filename) != os.path.realpath(lock):
            raise
        msg = f"can't hold {folder} for this run: {(error.strerror or str(error)).lower()} ({lock}); give another --out"
        raise OutputError(msg) from error
    finally:
        for each in (folder, *made):
            with contextlib.suppress(OSError):  # not empty: the certificate, or what a second run resumes from
                each.rmdir()


def require_other_folder(folder: Path, models: Iterable[str | Path | None]) -> None:
    """Raise `OutputError` where the certificate would be one more file of a model, which the gate would then refuse."""
    for model in models:
        if model is not None and folder.is_dir() and os.path.isdir(model) and folder.samefile(model):  # noqa: PTH112 - a hub name is no path
            msg = f"{folder} is a model's folder, and a certificate there would be one of its files; give another --out"
            raise OutputError(msg)


def _require_room(folder: Path) -> None:
    """Raise `OutputError` for what would be in the way of a run's files when it ends, or would be lost by them."""
    for name in _WRITTEN:
        if (folder / name).exists() and not (folder / name).is_file():
            msg = f"{folder / name} is no file, so none can be put there; give another --out"
            raise OutputError(msg)
    there = [name for name in _WRITTEN if (folder / name).exists()]
    if CERTIFICATE in there:
        known = _is_ours(folder / CERTIFICATE)
    else:
        known = not there or any((folder / name).exists() for name in (PREVIOUS, CHECKPOINT))
    if not known:
        msg = f"{folder / there[-1]} is not of a run of specverify, which would write over it; give another --out"
        raise OutputError(msg)


def _is_ours(certificate: Path) -> bool:
    """Whether it names us, of whatever version it is; one that can't be opened is refused by whoever wants to write there."""
    try:
        with certificate.open("rb") as file:
            return b"specverify" in file.read(_MOST_LOOKED_AT)
    except OSError:
        return True


def last_of(folder: Path) -> Certificate | None:
    """The certificate that a run is about to replace, to compare it with; None where there is none that can be read."""
    from specverify.statement import read_certificate

    for place in (folder, folder / PREVIOUS):
        with contextlib.suppress(OutputError):
            return read_certificate(place / CERTIFICATE)
    return None


def set_aside(folder: Path) -> None:
    """Move what an earlier run wrote into `previous/`: beside a run that was refused or stopped it would be read as its result.

    Without a certificate the other files may be somebody else's, and stay. Raises `OutputError`.
    """
    if (folder / CERTIFICATE).is_file():
        move_aside(folder, _WRITTEN)


def move_aside(folder: Path, names: Iterable[str]) -> None:
    """Those of the files that are there, into `previous/`. Raises `OutputError`."""
    there = [name for name in names if (folder / name).is_file()]
    try:
        for name in there:
            (folder / PREVIOUS).mkdir(exist_ok=True)
            (folder / name).replace(folder / PREVIOUS / name)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        msg = f"can't move {there[0]} of an earlier run in {folder} aside: {reason}; give another --out"
        raise OutputError(msg) from error


def render(certificate: Certificate, last: Certificate | None = None) -> dict[str, str]:
    """Every file's text by its name, without secrets; nothing is written yet."""
    from specverify.report.html import render_html
    from specverify.report.junit import render_junit
    from specverify.report.markdown import render_markdown
    from specverify.statement import render_statement

    certificate = without_secrets(certificate)
    return {
        "report.html": render_html(certificate, last),
        "junit.xml": render_junit(certificate),
        "summary.md": render_markdown(certificate, last),
        CERTIFICATE: render_statement(certificate),
    }


def write_all(folder: Path, texts: dict[str, str]) -> None:
    """All files or none: written aside, then renamed into place. Raises `OutputError`."""
    aside = folder / f".unfinished-{secrets.token_hex(4)}"
    try:
        for name, text in texts.items():
            write_text_atomically(aside / name, text)
        for name in texts:
            (aside / name).replace(folder / name)
        shutil.rmtree(folder / PREVIOUS, ignore_errors=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        msg = f"can't put the certificate into {folder}: {reason}; run the same command again to resume"
        raise OutputError(msg) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)
