"""A server of our own: started on a free loopback port, waited for, and ended whatever happens.

Note [Ending servers]: the server leads a process group of its own, so its workers end with it, and a Ctrl-C at the terminal
reaches us alone. It is looked at without being reaped until the whole group has been told to end: while its leader is a
zombie, no other process can have got its number.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specverify.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "API_KEY",
    "LOOPBACK",
    "Server",
    "await_end",
    "free_port",
    "last_lines",
    "log_folder",
    "redacted",
    "serving",
    "signal_group",
    "starts_of",
    "terminable",
]

API_KEY = "SPECVERIFY_API_KEY"
"""Environment variable that holds the key of a server; never written, never printed."""
LOOPBACK = "127.0.0.1"
_POLL_S, _SAY_S, _ASK_S, _GRACE_S = 0.1, 5.0, 2.0, 10.0
_TAIL_LINES, _TAIL_BYTES = 3, 8192
_ERROR = re.compile(r"(?:\b\w+\.)*\b[A-Z]\w*(?:Error|Exception)\b: ")
_ERROR_BYTES, _ERROR_WIDTH, _ERRORS = 1 << 16, 200, 3
_KEEP = "went-wrong"
"""A file beside a log that is to be kept."""


@dataclass(frozen=True)
class Server:
    """A process that we started; leader of its own group."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def running(self) -> bool:
        """Whether it has not ended; leaves its exit status for `_end`."""
        return self.process.returncode is None and _status(self.process) is None

    def obituary(self) -> str:
        """How it ended and the last lines of its log, or nothing while it runs, or after we ended it."""
        ended = None if self.process.returncode is not None else _status(self.process)
        if ended is None:
            return ""
        how = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
        return f"the server ended with {how} {ended.si_status}; {self.last_words()}"

    def last_words(self) -> str:
        """The last errors and the last lines of its log, which is kept from now on: something went wrong."""
        with contextlib.suppress(OSError):
            self.log_path.with_name(_KEEP).touch()
        errors = _last_errors(self.log_path)
        named = f"its log's last errors are: {errors}; " if errors else ""
        return f"{named}its log ends: {last_lines(self.log_path)}; the whole log is {self.log_path}"


def _status(process: subprocess.Popen[Any]) -> os.waitid_result | None:
    """How a process ended, without reaping it; None while it runs."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def redacted(text: str) -> str:
    """The text without the API key, wherever a server has echoed it."""
    key = os.environ.get(API_KEY, "")
    return text.replace(key, "***") if key else text


def last_lines(log_path: Path, *, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log that say anything, in one line."""
    try:
        told = _tail(log_path, _TAIL_BYTES)
    except OSError:
        return "(no log)"
    return redacted(" | ".join(told[-lines:])) or "(nothing)"


def _last_errors(log_path: Path) -> str:
    """The last errors that differ, in their order: a server's farewell names no cause, and what stands above it does."""
    errors: list[str] = []
    with contextlib.suppress(OSError):
        for line in reversed(_tail(log_path, _ERROR_BYTES)):
            found = _ERROR.search(line)
            told = redacted(line[found.start() :])[:_ERROR_WIDTH] if found else ""
            if told and told not in errors:
                errors.append(told)
    return "; then ".join(reversed(errors[:_ERRORS]))


def _tail(log_path: Path, size: int) -> list[str]:
    """The lines in a log's last bytes that say anything."""
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - size))
        text = log.read().decode(errors="replace")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@contextlib.contextmanager
def log_folder(wanted: str) -> Iterator[Path]:
    """Where logs go; one of our own is taken away again unless something went wrong."""
    if wanted:
        yield Path(wanted)
        return
    folder = Path(tempfile.mkdtemp(prefix="specverify-"))
    yield folder
    if not (folder / _KEEP).exists():
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    *,
    port: int,
    health_url: str,
    log_path: Path,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    name: str = "",
) -> Iterator[Server]:
    """Start `command`, wait until `health_url` answers 200, and end it on the way out, also when interrupted.

    Standard output and error go to `log_path`; `environment` is added to our own;
    `name` is what messages call it. Raises `UsageError`, with the last lines of
    the log, where it can't be started, ends, or isn't healthy within `timeout_s`.

        with serving(command, port=port, health_url=f"http://127.0.0.1:{port}/health", log_path=log): ...
    """
    _require_free(port)
    with terminable():
        server = _started(command, log_path, environment)
        try:
            _await_health(server, health_url, timeout_s, say, name or command[0])
            yield server
        finally:
            _end(server.process)


def starts_of(
    stack: contextlib.ExitStack, serve: Callable[[int], contextlib.AbstractContextManager[Server]]
) -> Callable[[], Server]:
    """What starts a server, and starts it again once what is left of the one before has ended; the last ends with the stack.

    `serve` is given the number of the start, from 1, so that each has a log of its own.
    """
    running, numbers = stack.enter_context(contextlib.ExitStack()), itertools.count(1)

    def start() -> Server:
        running.close()
        return running.enter_context(serve(next(numbers)))

    return start


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            msg = f"port {port} of {LOOPBACK} is taken; leave {{port}} in the command, so that a free one is filled in"
            raise UsageError(msg) from error


def _started(command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None) -> Server:
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
                list(command),
                stdin=subprocess.PIPE,  # a child of ours ends when this closes, so it never outlives us
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
    except OSError as error:
        msg = f"can't start {command[0]}: {(error.strerror or str(error)).lower()}; is it installed, and on the PATH?"
        raise UsageError(msg) from error
    return Server(process, log_path)


def _await_health(server: Server, url: str, timeout_s: float, say: Callable[[str], None], name: str) -> None:
    begun = told = time.monotonic()
    while not _healthy(url):
        if not server.running:
            msg = f"{name} did not become healthy: {server.obituary()}"
            raise UsageError(msg)
        now = time.monotonic()
        if now - begun > timeout_s:
            msg = (
                f"{name} is not healthy after {timeout_s:.0f} s ({url}); its log ends: {last_lines(server.log_path)}; "
                f"the whole log is {server.log_path}"
            )
            raise UsageError(msg)
        if now - told > _SAY_S:
            told = now
            say(f"waiting for {name}, {now - begun:.0f} s: {last_lines(server.log_path, lines=1)}")
        time.sleep(_POLL_S)
    if not server.running:  # somebody else's answer, on a port that ours did not get
        msg = f"{name} did not become healthy: {server.obituary()}"
        raise UsageError(msg)
    say(f"{name} is healthy after {time.monotonic() - begun:.1f} s")


def _healthy(url: str) -> bool:
    """Whether it answers 200; asked directly, whatever proxy the environment names."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or LOOPBACK, parts.port, timeout=_ASK_S)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """While a process of ours runs, SIGTERM interrupts as Ctrl-C does; Python's default would leave the process behind."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group, then SIGKILL to what is left of it; a second Ctrl-C only makes it shorter."""
    try:
        signal_group(process, signal.SIGTERM)
        await_end(process, _GRACE_S)
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def await_end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait until a process has ended, or so long, and leave it to be reaped (Note [Ending servers])."""
    deadline = time.monotonic() + seconds
    while _status(process) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S / 2)


def signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """To a process that leads a group of its own and isn't reaped yet, and to whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it where only a zombie is left
        os.killpg(process.pid, number)
