"""Any server that completes a prompt over HTTP, in the dialects of vLLM, SGLang, llama.cpp and TGI.

Connections that fail are tried again and counted (`retries`); an answer that is an error is not: it is a finding, with the
id of its request. The API key comes from the environment variable SPECVERIFY_API_KEY, and goes nowhere but into a header.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import httpx2
import stamina

from specverify.engines import Capability
from specverify.engines.dialect import DIALECTS, Ask, part, read_counters
from specverify.engines.server import API_KEY, LOOPBACK, free_port, redacted, serving
from specverify.errors import PlanError, RequestRefused, SubjectError, UsageError
from specverify.records import DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from specverify.engines import EngineSettings
    from specverify.engines.dialect import Dialect
    from specverify.engines.server import Server
    from specverify.records import DecodeCounters, DecodeRequest

__all__ = ["Endpoint", "HttpEngine", "opened", "opened_sglang", "opened_tgi", "opened_vllm"]

_OPTIONS = {
    "dialect": "vllm",
    "off_url": "",
    "serve_off": "",
    "concurrency": "",
    "timeout_s": "120",
    "start_timeout_s": "600",
    "attempts": "4",
    "logprobs": "yes",
    "log_dir": "",
}
"""Options and their defaults; `off_url` and `serve_off` are the same server without speculation."""
_FIRST_LINE = 300
"""Characters of an error's body that a finding shows."""

logging.getLogger("stamina").addHandler(logging.NullHandler())  # retries are counted, not printed


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One server: where it is, and its process where it is ours."""

    client: httpx2.Client
    url: str
    model: str = ""
    server: Server | None = None


@dataclass
class HttpEngine:
    """A server as an engine; `retries` counts the calls that had to be repeated because a connection failed."""

    dialect: Dialect
    on: Endpoint
    off: Endpoint | None = None
    """The same server without speculation."""
    name: str = ""
    model_eos_ids: frozenset[int] = frozenset()
    concurrency: int = 16
    attempts: int = 4
    logprobs: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None
    """Of the target, for a dialect that takes text."""
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Of the dialect; speculation can be switched where there is a server without it."""
        without = frozenset() if self.logprobs else frozenset({Capability.LOGPROBS})
        switch = frozenset({Capability.SPECULATION_SWITCH}) if self.off else frozenset()
        return (self.dialect.capabilities - without) | switch

    @property
    def parameters(self) -> frozenset[str]:
        """Those that the dialect has a name for."""
        return self.dialect.parameters

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Traces in the order of the requests and their samples, up to `concurrency` calls side by side.

        Raises `SubjectError` with the request's id where the server answers with an error, too late or not at all.
        """
        asks = [ask for request in requests for ask in self._asks(request)]
        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            futures = [pool.submit(self._answered, ask) for ask in asks]
            try:
                for future in futures:
                    yield from future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def counters(self) -> DecodeCounters:
        """What the server with speculation tells on `/metrics`."""
        response = self._called(self.on, "GET", "/metrics", None, "the counters")
        return read_counters(response.text)

    def _asks(self, request: DecodeRequest) -> Iterator[Ask]:
        endpoint = self._endpoint(request)
        text = "" if self.dialect.takes_ids else self._text(request)
        for first in range(0, request.num_samples, self.dialect.most_samples):
            yield Ask(
                request=request,
                first_sample=first,
                num_samples=min(self.dialect.most_samples, request.num_samples - first),
                seed=_seed32(request.seed, first),
                model=endpoint.model,
                model_eos_ids=self.model_eos_ids,
                text=text,
                logprobs=self.logprobs,
            )

    def _endpoint(self, request: DecodeRequest) -> Endpoint:
        if request.speculation:
            return self.on
        if self.off is None:
            msg = f"{self.name} can't be asked without speculation: give the same server without it as off_url or serve_off"
            raise PlanError(msg)
        return self.off

    def _text(self, request: DecodeRequest) -> str:
        """A text that the server's tokenizer turns into just these ids."""
        if self.tokenizer is None:
            msg = f"{self.name} takes text, and the target's tokenizer isn't there"
            raise PlanError(msg)
        ids = list(request.prompt_ids)
        for kept in (ids, ids[1:]):  # it adds the BOS itself
            text = cast("str", self.tokenizer.decode(kept, skip_special_tokens=False))
            if self.tokenizer.encode(text) == ids:
                return text
        msg = f"request {request.id}: no text has exactly these ids, and {self.dialect.name} takes text alone"
        raise RequestRefused(msg)

    def _answered(self, ask: Ask) -> list[DecodeTrace]:
        request = ask.request
        what = f"request {request.id} (sample {ask.first_sample}, seed {ask.seed})"
        try:
            payload = self.dialect.payload(ask)
            body = _json(self._called(self._endpoint(request), "POST", self.dialect.path, payload, what), what)
            answers = self.dialect.answers(ask, body)
        except SubjectError as error:
            if str(error).startswith(what):
                raise
            msg = f"{what}: {error}"
            raise type(error)(msg) from error
        if len(answers) != ask.num_samples:
            msg = f"{what}: {ask.num_samples} samples were asked for, and {len(answers)} came"
            raise SubjectError(msg)
        return [
            DecodeTrace(
                request=request,
                sample=ask.first_sample + number,
                token_ids=answer.token_ids,
                finish=answer.finish,
                logprobs=answer.logprobs,
            )
            for number, answer in enumerate(answers)
        ]

    def _called(
        self, endpoint: Endpoint, method: str, path: str, payload: dict[str, Any] | None, what: str
    ) -> httpx2.Response:
        """The answer to one call, if it is none of an error."""
        where = f"{method} {path}"
        try:
            response = self._tried(endpoint, method, path, payload)
        except httpx2.TimeoutException as error:
            msg = f"{what}: {where} got no answer in time ({type(error).__name__})"
            raise SubjectError(msg) from error
        except httpx2.TransportError as error:
            died = endpoint.server.obituary() if endpoint.server else ""
            msg = f"{what}: {where} failed: {died or redacted(str(error)) or type(error).__name__}"
            raise SubjectError(msg) from error
        if response.status_code in {401, 403}:
            msg = f"{endpoint.url} refuses us ({response.status_code}); put its key into the environment variable {API_KEY}"
            raise UsageError(msg)
        if response.is_error:
            kind = RequestRefused if response.is_client_error else SubjectError
            msg = f"{what}: {where} answered {response.status_code}: {_first_line(response)}"
            raise kind(msg)
        return response

    def _tried(self, endpoint: Endpoint, method: str, path: str, payload: dict[str, Any] | None) -> httpx2.Response:
        """Again where the connection failed, unless our own server has ended; never where an answer is late."""

        def worth(error: Exception) -> bool:
            failed = isinstance(error, (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout))
            return failed and (endpoint.server is None or endpoint.server.running)

        for attempt in stamina.retry_context(on=worth, attempts=self.attempts, timeout=None, wait_max=2.0):
            if attempt.num > 1:
                with self._lock:
                    self.retries += 1
            with attempt:
                return endpoint.client.request(method, path, json=payload)
        raise AssertionError  # the context has returned or raised


def _seed32(seed: int, sample: int) -> int:
    """32 bits from both; the largest, which llama.cpp takes for "any", is left out."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**32 - 1)


def _json(response: httpx2.Response, what: str) -> Any:  # noqa: ANN401 - somebody else's
    try:
        return response.json()
    except ValueError as error:
        msg = f"{what}: the answer is no JSON: {_first_line(response)}"
        raise SubjectError(msg) from error


def _first_line(response: httpx2.Response) -> str:
    line = next((line.strip() for line in response.text.splitlines() if line.strip()), "(no text)")
    return redacted(line)[:_FIRST_LINE]


# ------------------------------------------------------------------------------------------------------ from settings


@contextlib.contextmanager
def opened(settings: EngineSettings, *, say: Callable[[str], None] = lambda _: None) -> Iterator[HttpEngine]:
    """The engine of `settings.url`, or of a server started with `settings.serve`, in the dialect of the option `dialect`.

    Raises `PlanError` for an option that isn't one, `UsageError` where no server answers.

        with opened(EngineSettings(target=folder, url="http://127.0.0.1:8000")) as engine: ...
    """
    options = _read_options(settings)
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


def _read_options(settings: EngineSettings) -> dict[str, str]:
    options = {**_OPTIONS, **dict(settings.options)}
    if unknown := sorted(set(options) - set(_OPTIONS)):
        msg = f"a server has no option '{unknown[0]}'; it may be one of {', '.join(_OPTIONS)}"
        raise PlanError(msg)
    if options["dialect"] not in DIALECTS:
        msg = f"there is no dialect '{options['dialect']}'; use one of {', '.join(DIALECTS)}"
        raise PlanError(msg)
    for name in ("concurrency", "timeout_s", "start_timeout_s", "attempts"):
        if options[name] and not (options[name].isdecimal() and int(options[name])):
            msg = f"the option {name} is {options[name]!r}; it must be a whole number of at least 1"
            raise PlanError(msg)
    if options["logprobs"] not in {"yes", "no"}:
        msg = f"the option logprobs is {options['logprobs']!r}; it must be yes or no"
        raise PlanError(msg)
    return options


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
    server = None
    if command:
        port = free_port()
        url = f"http://{LOOPBACK}:{port}"
        log = stack.enter_context(_log_folder(options["log_dir"])) / f"server-{arm}.log"
        started = serving(
            _filled(command, settings, port),
            port=port,
            health_url=f"{url}/health",
            log_path=log,
            timeout_s=float(options["start_timeout_s"]),
            say=say,
        )
        server = stack.enter_context(started)
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
    return Endpoint(client=client, url=url, model=model, server=server)


def make_client(url: str, *, timeout_s: float) -> httpx2.Client:
    """A client of one server, with the key in its headers; a loopback server is asked directly, whatever the proxies."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        msg = f"{url!r} is no url of a server; it begins with http:// or https://"
        raise PlanError(msg)
    key = os.environ.get(API_KEY, "")
    return httpx2.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(timeout_s, connect=min(10.0, timeout_s)),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=parts.hostname not in {LOOPBACK, "localhost", "::1"},
    )


def _first_model(client: httpx2.Client, url: str) -> str:
    response = client.get("/v1/models")
    if response.is_error:
        msg = f"{url}/v1/models answered {response.status_code}; name the model, or put the key into {API_KEY}"
        raise UsageError(msg)
    return str(part(_json(response, f"{url}/v1/models"), "data", 0, "id"))


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


@contextlib.contextmanager
def _log_folder(wanted: str) -> Iterator[Path]:
    """Where logs go; one of our own is taken away again unless something went wrong."""
    if wanted:
        yield Path(wanted)
        return
    folder = Path(tempfile.mkdtemp(prefix="specverify-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
