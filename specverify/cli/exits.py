"""How a command ends: an exit code and one sentence, never a traceback on the terminal.

0    PASS
1    FAIL, or what is under test broke
2    usage: the sentence says what to do
3    INCONCLUSIVE, or nothing ran
70   a bug in specverify; the traceback is in a file
130  interrupted
143  ended by SIGTERM
141  whoever read our output has gone
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specverify.errors import ClaimViolated, InternalError, OutputError, SubjectError, UsageError
from specverify.records import Verdict
from specverify.redaction import redacted
from specverify.report.text import at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["EXIT_CODES", "Interrupted", "Terminated", "crash_kept_in", "guarded", "leave", "say", "terminable"]

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3, Verdict.NOT_RUN: 3}
_PRINTERS = {"typer", "click", "rich"}  # libraries that write what we print
_MOST_CHARACTERS = 2_000  # of a sentence
_OF_A_NAME = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ELOOP, errno.ESTALE}
BROKEN, USAGE, BUG, INTERRUPTED, PIPE, TERMINATED = 1, 2, 70, 130, 141, 143


class Interrupted(Exception):
    """The user stopped the run; the sentence says how to go on."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, as from a scheduler or `timeout`: as Ctrl-C, with an exit code of its own."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """While it lasts, SIGTERM unwinds the run as Ctrl-C does, so that locks go and what is finished can be resumed."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: whoever runs us there deals with signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: int) -> int:
    """The exit code; after an interruption the process ends here, without waiting for threads that still compute."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # closed from the start
            continue
        except OSError:  # what is left of it would make the interpreter end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code in (INTERRUPTED, TERMINATED):
        os._exit(code)
    return code


def guarded(command: Callable[[], int | None], *, as_json: bool) -> int:
    """The exit code of a command, with one sentence on standard error where it did not end by itself."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that lacks a sign gets another
    try:
        code = command() or 0
        if sys.stdout is not None:  # it may have been closed from the start
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return PIPE
    except OSError as error:
        found = _of_standard_output(error) or error
        sentence, code = _sentence(found)
        return _end(sentence, type(found).__name__, code, as_json=as_json)
    except SystemExit:  # typer's answer to a broken pipe; it has no other
        return PIPE
    except (KeyboardInterrupt, typer.Abort) as error:
        code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        return _end("interrupted", "Interrupted", code, as_json=as_json)
    except BaseException as error:  # noqa: BLE001 - the edge: nothing may get past it, nor a panic of tokenizers, which is no Exception
        sentence, code = _sentence(error)
        return _end(sentence, type(error).__name__, code, as_json=as_json)
    return _end("interrupted", "Interrupted", code, as_json=as_json) if code == INTERRUPTED else code


def _of_standard_output(error: OSError) -> UsageError | None:
    """What to say where it was our own output that couldn't be written; what is left of it is given up."""
    written_by = set(Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        if error.filename is not None or not written_by & _PRINTERS:
            return None
    except OSError:
        pass
    with contextlib.suppress(OSError, ValueError):  # or the interpreter complains at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = (error.strerror or str(error)).lower()
    return OutputError(f"can't write to standard output: {reason}; send it elsewhere, or free some space")


def _of_a_name(error: OSError) -> UsageError:
    """What to say of a name that can't even be looked up."""
    reason = (error.strerror or str(error)).lower()
    return OutputError(f"can't use {str(error.filename)!r:.200}: {reason}; check the path")


def say(sentence: str) -> None:
    """One line to whoever watches, on standard error; where that can't be written, nobody does."""
    with contextlib.suppress(OSError):
        typer.echo(f"specverify: {redacted(at_most(sentence, _MOST_CHARACTERS))}", err=True)


@contextlib.contextmanager
def crash_kept_in(folder: Path) -> Iterator[None]:
    """Whatever nobody expected leaves its traceback in `folder` and becomes an `InternalError` that says so."""
    try:
        yield
    except (UsageError, SubjectError, ClaimViolated, Interrupted, BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except MemoryError as error:
        msg = "the machine ran out of memory; set a smaller batch_size in the plan, or use --budget quick"
        raise UsageError(msg) from error
    except Exception as error:
        if isinstance(error, OSError) and (unwritable := _of_standard_output(error)):
            raise unwritable from error
        if isinstance(error, OSError) and error.errno in _OF_A_NAME and error.filename is not None:
            raise _of_a_name(error) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            msg = "the disk is full; free some space, then run the same command again to resume"
            raise UsageError(msg) from error
        raise InternalError(_bug(error, folder)) from error


def _bug(error: BaseException, folder: Path) -> str:
    named = str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    head = " ".join(named.split())[:200]
    text = redacted("".join(traceback.format_exception(error)))
    for place in (folder, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            file = _crash_file(place)
            file.write_text(text, encoding="utf-8")
            return f"{head}; this is a bug in specverify: please report it with your command and {file}"
    return f"{head}; this is a bug in specverify: please report it with your command"


def _crash_file(place: Path) -> Path:
    """`crash.txt` in a run's folder; where everybody writes, a new name that nobody can have put a link under."""
    if place == Path(tempfile.gettempdir()):
        handle, name = tempfile.mkstemp(prefix="specverify-crash-", suffix=".txt")
        os.close(handle)
        return Path(name)
    place.mkdir(parents=True, exist_ok=True)
    return place / "crash.txt"


def _sentence(error: BaseException) -> tuple[str, int]:
    """What to say, and the code to end with."""
    if isinstance(error, OSError) and error.errno in _OF_A_NAME and error.filename is not None:
        error = _of_a_name(error)
    match error:
        case Interrupted():
            return str(error), TERMINATED if isinstance(error.__cause__, Terminated) else INTERRUPTED
        case UsageError():
            return f"error: {error}", USAGE
        case SubjectError() | ClaimViolated():
            return f"what is under test broke: {error}", BROKEN
        case InternalError():
            return f"internal error: {error}", BUG
    if hasattr(error, "format_message"):  # typer's own, about an option or argument
        asked = getattr(getattr(error, "ctx", None), "command_path", "specverify")
        return f"error: {error.format_message().rstrip('.')}; see `{asked} --help`", USAGE
    return f"internal error: {_bug(error, Path(tempfile.gettempdir()))}", BUG


def _end(sentence: str, kind: str, code: int, *, as_json: bool) -> int:
    say(sentence)
    if as_json:
        said = redacted(" ".join(sentence.removeprefix("error: ").split()))
        with contextlib.suppress(OSError):
            typer.echo(json.dumps({"error": said, "kind": kind, "exit_code": code}))
    return code
