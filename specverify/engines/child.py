"""An engine in a process of its own, so that one that dies natively is a finding with its request, not the end of ours.

The parent writes a line of JSON and reads one back; nothing else passes between the two. What the engine prints goes to a log.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from specverify import errors
from specverify.engines import Capability, EngineSettings
from specverify.engines.options import Options
from specverify.engines.server import await_end, last_lines, log_folder, signal_group, terminable
from specverify.errors import SpecverifyError, UsageError
from specverify.records import DecodeCounters, DecodeRequest, DecodeStep, DecodeTrace, FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.engines import Engine, EngineFactory, Metered

__all__ = ["ChildEngine", "opened_in_child"]

_LIMITS = Options(
    engine="in a process of its own",
    defaults={"timeout_s": "600", "start_timeout_s": "600"},
    numbers=frozenset({"timeout_s", "start_timeout_s"}),
)
"""Seconds for an answer to all requests of a call, and for the start with the first import and the reading of models."""
_GRACE_S = 10.0
_OF_TEXTS = {Capability.STREAM, Capability.SCHEMA}
"""What isn't asked over the pipe."""


@dataclass
class ChildEngine:
    """What the child says that it is, and its answers; one that died, or was ended for its silence, is started anew."""

    factory: str
    """`module:callable`, an `EngineFactory`."""
    settings: EngineSettings
    log_path: Path
    timeout_s: float
    start_timeout_s: float
    name: str = ""
    capabilities: frozenset[Capability] = frozenset()
    parameters: frozenset[str] = frozenset()
    _process: subprocess.Popen[str] | None = None
    _counted: list[DecodeCounters] = field(default_factory=list)
    """The last that each child told, in their order."""

    def start(self) -> None:
        """Open the engine in a new child. Raises `UsageError` where that can't be."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specverify.engines.child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8",
                start_new_session=True,  # a Ctrl-C is ours to handle
            )  # fmt: skip
        try:
            said = self._asked({"factory": self.factory, "settings": asdict(self.settings)}, "start_timeout_s")
        except UsageError:
            raise
        except Exception as error:
            msg = f"{self.factory.partition(':')[0]} can't be opened: {type(error).__name__}: {error}"
            raise UsageError(msg) from error
        self.name, self.parameters = said["name"], frozenset(said["parameters"])
        self.capabilities = frozenset(map(Capability, said["capabilities"])) - _OF_TEXTS
        if Capability.COUNTERS in self.capabilities:
            self._counted.append(_counters(said["counters"]))

    def end(self) -> None:
        """Close its pipe, on which it ends; and kill it where it doesn't, with whatever it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with contextlib.suppress(OSError):
                cast("TextIO", process.stdin).close()
            await_end(process, _GRACE_S)
        finally:
            signal_group(process, signal.SIGKILL)
            process.wait()
            cast("TextIO", process.stdout).close()

    def counters(self) -> DecodeCounters:
        """Of all children together."""
        first, *others = self._counted
        for one in others:
            first += one
        return first

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """What the child answers. Raises `ChildProcessError` where it dies or is silent, and otherwise what the engine raises."""
        if self._process is None:
            self.start()
        said = self._asked({"requests": [asdict(request) for request in requests]}, "timeout_s")
        if said["counters"] is not None:
            self._counted[-1] = _counters(said["counters"])
        for trace in said["traces"]:
            yield DecodeTrace(
                request=requests[trace["request"]],
                sample=trace["sample"],
                token_ids=tuple(trace["token_ids"]),
                finish=FinishReason(trace["finish"]),
                steps=tuple(DecodeStep(**_tuples(step)) for step in trace["steps"]),
                logprobs=tuple(trace["logprobs"]),
            )

    def _asked(self, question: dict[str, Any], limit: str) -> dict[str, Any]:
        """The child's answer, within the seconds of the field `limit`."""
        process, seconds = self._process, float(getattr(self, limit))
        assert process is not None
        answer, silent = "", threading.Event()

        def end_it() -> None:
            silent.set()
            signal_group(process, signal.SIGKILL)  # all of them: one that is left would hold our end of the pipe open

        timer = threading.Timer(seconds, end_it)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # the pipe of one that died
                print(json.dumps(question, default=str), file=process.stdin, flush=True)
                answer = cast("TextIO", process.stdout).readline()
        finally:
            timer.cancel()
            timer.join()
        # an answer in the very moment is late, too: its process is gone
        if silent.is_set() or not answer.endswith("\n"):
            self.end()
            how = f"ended with {_how(process.returncode)}"
            if silent.is_set():
                how = (
                    f"gave no answer within {seconds:g} s and was ended (if the machine is slow and not the engine, give it more "
                    f"with `--option {limit}=SECONDS`)"
                )
            msg = f"its process {how}; its log ends: {last_lines(self.log_path)}"
            raise ChildProcessError(msg)
        said: dict[str, Any] = json.loads(answer)
        if "raised" in said:
            kind = getattr(errors, said["raised"], None)
            raise (kind or type(said["raised"], (RuntimeError,), {}))(said["text"])
        return said


def _how(status: int) -> str:
    """As a user knows it."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists alone; the fields of our records hold tuples, of tuples in places."""
    return {key: _frozen(value) for key, value in table.items()}


def _frozen(value: Any) -> Any:  # noqa: ANN401 - JSON is any
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _counters(table: dict[str, Any]) -> DecodeCounters:
    return DecodeCounters(**_tuples(table))


@contextlib.contextmanager
def opened_in_child(factory: str, settings: EngineSettings) -> Iterator[ChildEngine]:
    """The engine that `factory` (`module:callable`) opens, in a process of its own, which ends with the context.

    The options `timeout_s` and `start_timeout_s` are read here. Raises `PlanError` for what they can't be, and `UsageError`.
    """
    limits = _LIMITS.read(tuple(each for each in settings.options if each[0] in _LIMITS.defaults))
    settings = replace(settings, options=tuple(each for each in settings.options if each[0] not in limits))
    with log_folder("") as folder, terminable():
        engine = ChildEngine(
            factory, settings, folder / "engine.log", float(limits["timeout_s"]), float(limits["start_timeout_s"])
        )
        try:
            engine.start()
            yield engine
        finally:
            engine.end()


# ------------------------------------------------------------------------------------------------------- in the child


def _serve(questions: TextIO, answers: TextIO) -> None:
    """Open the engine that the first line names, then answer a line with a line until they end."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(_opened(json.loads(questions.readline())))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent says it
            say(_raised(error))
            return
        say({**_described(engine), "counters": _told(engine)})
        for line in questions:
            try:
                asked = json.loads(line)["requests"]
                say({"traces": _traces(engine, list(map(_request, asked))), "counters": _told(engine)})
            except Exception as error:  # noqa: BLE001 - as above
                say(_raised(error))


def _opened(question: dict[str, Any]) -> contextlib.AbstractContextManager[Engine]:
    module, _, name = question["factory"].partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), name)
    table = _tuples(question["settings"])
    settings = EngineSettings(**table)
    draft = Path(table["draft"]) if table["draft"] is not None else None
    return factory(replace(settings, target=Path(table["target"]), draft=draft))


def _described(engine: Engine) -> dict[str, Any]:
    return {"name": engine.name, "capabilities": sorted(engine.capabilities), "parameters": sorted(engine.parameters)}


def _told(engine: Engine) -> dict[str, Any] | None:
    if Capability.COUNTERS not in engine.capabilities:
        return None
    return asdict(cast("Metered", engine).counters())


def _request(table: dict[str, Any]) -> DecodeRequest:
    return DecodeRequest(**{**_tuples(table), "params": SamplingParams(**_tuples(table["params"]))})


def _traces(engine: Engine, requests: list[DecodeRequest]) -> list[dict[str, Any]]:
    """Each with the place of its request, which the parent has already."""
    places = {id(request): place for place, request in enumerate(requests)}
    return [
        {
            "request": places[id(trace.request)],
            "sample": trace.sample,
            "token_ids": trace.token_ids,
            "finish": trace.finish,
            "steps": [asdict(step) for step in trace.steps],
            "logprobs": trace.logprobs,
        }
        for trace in engine.decode(requests)
    ]


def _raised(error: Exception) -> dict[str, str]:
    ours = isinstance(error, SpecverifyError)
    return {"raised": type(error).__name__, "text": str(error) if ours else " ".join(str(error).split())}


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints must not stand among the answers
    _serve(sys.stdin, own)
