"""Any server that completes a prompt over HTTP, in the dialects of vLLM, SGLang, llama.cpp and TGI: found, or started."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import httpx2

from specverify.engines.dialect import DIALECTS, part
from specverify.engines.http_engine import Endpoint, HttpEngine, json_of, make_client
from specverify.engines.options import Options, json_object
from specverify.engines.server import API_KEY, LOOPBACK, free_port, log_folder, serving, starts_of
from specverify.errors import PlanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from specverify.engines import EngineSettings
    from specverify.engines.dialect import Dialect
    from specverify.engines.server import Server

__all__ = ["opened", "opened_sglang", "opened_tgi", "opened_vllm"]

_OPTIONS = Options(
    engine="openai",
    defaults={
        "dialect": "vllm",
        "off_url": "",
        "serve_off": "",
        "concurrency": "",
        "timeout_s": "120",
        "start_timeout_s": "600",
        "attempts": "4",
        "logprobs": "yes",
        "extra": "",
        "log_dir": "",
    },
    choices={"dialect": tuple(DIALECTS), "logprobs": ("yes", "no")},
    counts=frozenset({"concurrency", "attempts"}),
    numbers=frozenset({"timeout_s", "start_timeout_s"}),
)
"""`off_url` and `serve_off` are the same server without speculation; `extra` is a JSON object that goes into every call."""


@contextlib.contextmanager
def opened(settings: EngineSettings, *, say: Callable[[str], None] = lambda _: None) -> Iterator[HttpEngine]:
    """The engine of `settings.url`, or of a server started with `settings.serve`, in the dialect of the option `dialect`.

    Raises `PlanError` for an option that isn't one, `UsageError` where no server answers.

        with opened(EngineSettings(target=folder, url="http://127.0.0.1:8000")) as engine: ...
    """
    options = _OPTIONS.read(settings.options)
    extra = json_object(options["extra"], "extra")
    dialect = DIALECTS[options["dialect"]]
    if bool(settings.url) == bool(settings.serve):
        msg = f"the engine {dialect.name} needs either the url of a server that runs or a command that serves"
        raise PlanError(msg)
    with contextlib.ExitStack() as stack:
        endpoint = partial(_endpoint, stack, settings, options, dialect, say=say)
        on = endpoint(settings.url, settings.serve, "on")
        off = endpoint(options["off_url"], options["serve_off"], "off") if _has_off(options) else None
        yield HttpEngine(
            dialect=dialect,
            on=on,
            off=off,
            name=f"{dialect.name} at {on.url}",
            model_eos_ids=frozenset(settings.eos_token_ids),
            concurrency=int(options["concurrency"] or settings.max_batch_size),
            attempts=int(options["attempts"]),
            logprobs=options["logprobs"] == "yes",
            extra=extra,
            tokenizer=None if dialect.takes_ids else _tokenizer(settings.target),
        )


def _dialect_opened(
    dialect: str, settings: EngineSettings, *, say: Callable[[str], None] = lambda _: None
) -> contextlib.AbstractContextManager[HttpEngine]:
    return opened(replace(settings, options=(*settings.options, ("dialect", dialect))), say=say)


opened_vllm = partial(_dialect_opened, "vllm")
"""`opened` for vLLM."""
opened_sglang = partial(_dialect_opened, "sglang")
"""`opened` for SGLang."""
opened_tgi = partial(_dialect_opened, "tgi")
"""`opened` for TGI."""


def _has_off(options: dict[str, str]) -> bool:
    return bool(options["off_url"] or options["serve_off"])


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # noqa: PLC0415 - for one dialect

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(folder))


def _endpoint(
    stack: contextlib.ExitStack,
    settings: EngineSettings,
    options: dict[str, str],
    dialect: Dialect,
    url: str,
    command: str,
    arm: str,
    *,
    say: Callable[[str], None],
) -> Endpoint:
    """A server that answers: one that runs, or one that ends with the stack."""
    server = start = None
    if command:
        port = free_port()
        url = f"http://{LOOPBACK}:{port}"
        folder = stack.enter_context(log_folder(options["log_dir"]))
        words = _filled(command, settings, port)

        def serve(number: int) -> contextlib.AbstractContextManager[Server]:
            return serving(
                words, port=port, health_url=f"{url}/health", say=say, name=f"{dialect.name} ({arm})",
                log_path=folder / f"server-{arm}{f'-{number}' if number > 1 else ''}.log",
                timeout_s=float(options["start_timeout_s"]),
            )  # fmt: skip

        start = starts_of(stack, serve)
        server = start()
    client = stack.enter_context(make_client(url, timeout_s=float(options["timeout_s"])))
    try:
        health = client.get("/health")
    except httpx2.TransportError as error:
        msg = f"no server answers at {url} ({type(error).__name__}); start it, or check the url"
        raise UsageError(msg) from error
    if health.is_server_error:
        msg = f"the server at {url} says that it is not ready ({health.status_code}); wait until it is"
        raise UsageError(msg)
    model = settings.model or (_first_model(client, url) if dialect.needs_model else "")
    return Endpoint(client=client, url=url, model=model, server=server, start_again=start)


def _first_model(client: httpx2.Client, url: str) -> str:
    response = client.get("/v1/models")
    if response.is_error:
        msg = f"{url}/v1/models answered {response.status_code}; name the model, or put the key into {API_KEY}"
        raise UsageError(msg)
    return str(part(json_of(response, f"{url}/v1/models"), "data", 0, "id"))


def _filled(command: str, settings: EngineSettings, port: int) -> list[str]:
    """The command's words, with their places filled in; the JSON among them keeps its braces."""
    places = {"{port}": str(port), "{target}": str(settings.target), "{draft}": str(settings.draft or "")}
    places["{num_speculative_tokens}"] = str(settings.num_speculative_tokens)
    if "{port}" not in command:
        msg = "the command that serves needs {port} where its port stands"
        raise PlanError(msg)
    words = shlex.split(command)
    for place, value in places.items():
        words = [word.replace(place, value) for word in words]
    return words
