"""A server that completes a prompt over HTTP, as an engine.

Connections that fail are tried again and counted (`retries`); an answer that is an error is not: it is a finding, with the
id of its request. The API key comes from the environment variable SPECVERIFY_API_KEY, and goes nowhere but into a header.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import httpx2
import stamina

from specverify.engines import Capability, Told
from specverify.engines.dialect import Ask, read_counters
from specverify.engines.http_text import TEXTS, events_of
from specverify.engines.seeds import seed32
from specverify.engines.server import API_KEY, LOOPBACK, redacted
from specverify.errors import PlanError, RequestRefused, SubjectError, UsageError
from specverify.records import DecodeTrace
from specverify.redaction import is_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from specverify.engines.dialect import Dialect
    from specverify.engines.server import Server
    from specverify.records import DecodeCounters, DecodeRequest

__all__ = ["Endpoint", "HttpEngine", "json_of", "make_client"]

_Asked = TypeVar("_Asked")
_Answered = TypeVar("_Answered")
_MOST_STARTS = 12
"""Of one server, after which its deaths have been seen often enough."""
_DYING_S = 10.0
"""What a server that has lost its engine may take to end."""
_FIRST_LINE = 300
"""Characters of an error's body that a finding shows."""

logging.getLogger("stamina").addHandler(logging.NullHandler())  # retries are counted, not printed


@dataclass(kw_only=True)
class Endpoint:
    """One server: where it is, and its process where it is ours."""

    client: httpx2.Client
    url: str
    model: str = ""
    server: Server | None = None
    start_again: Callable[[], Server] | None = None
    """Starts one in the place of `server`, where that has ended."""
    starts: int = 1

    def stand(self) -> None:
        """One request that kills a server must not decide what others show, so a server of ours that ended is started again.

        Raises `SubjectError` where it ends whatever is asked, or doesn't start.
        """
        if self.server is None or self.start_again is None or self.server.running:
            return
        died = self.server.obituary()
        if self.starts >= _MOST_STARTS:
            msg = f"the server was started {self.starts} times and ended each time, so it isn't started again: {died}"
            raise SubjectError(msg)
        self.starts += 1
        try:
            self.server = self.start_again()
        except UsageError as error:
            msg = f"the server did not start again after it had ended: {error}"
            raise SubjectError(msg) from error


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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the body of every call."""
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
        for endpoint in (self.on, self.off):
            if endpoint and any(self._endpoint(request) is endpoint for request in requests):
                endpoint.stand()
        for answers in self._side_by_side(self._answered, asks):
            yield from answers

    def _side_by_side(self, call: Callable[[_Asked], _Answered], each: Sequence[_Asked]) -> Iterator[_Answered]:
        """Answers in order, of up to `concurrency` calls at once; an interrupt doesn't wait for one that is late."""
        pool = ThreadPoolExecutor(max_workers=self.concurrency)
        try:
            for future in [pool.submit(call, one) for one in each]:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """The first sample of a request as the server writes it, whole or put together from its events."""
        its = TEXTS[self.dialect.name]
        self._endpoint(request).stand()
        ask = replace(next(iter(self._asks(request))), num_samples=1, logprobs=False)
        with _named(ask) as what:
            payload = self.dialect.payload(ask) | dict(self.extra)
            payload = its.schema(payload, json.loads(schema)) if schema else payload
            if not stream:
                body = json_of(self._called(self._endpoint(request), "POST", self.dialect.path, payload, what), what)
                pieces: tuple[str, ...] = ()
            else:
                payload |= {"stream": True} if its.path == self.dialect.path else {}
                response = self._called(self._endpoint(request), "POST", its.path, payload, what)
                events = events_of(response.text, its.last)
                pieces = tuple(its.pieces(events))
                body = its.body(events, "".join(pieces))
            (answer,) = self.dialect.answers(ask, body)
            return Told(text=its.text(body), token_ids=answer.token_ids, finish=answer.finish, pieces=pieces)

    def prompt_logprobs(self, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
        """What the server without speculation says of texts, up to `concurrency` of them side by side."""
        for endpoint in {id(each): each for each in (self._endpoint(_off(trace.request)) for trace in traces)}.values():
            endpoint.stand()
        yield from self._side_by_side(partial(self._laws_of, top=top), traces)

    def _laws_of(self, trace: DecodeTrace, *, top: int) -> list[dict[int, float]]:
        ask = next(iter(self._asks(_off(trace.request))))
        with _named(ask) as what:
            if self.dialect.rescored is None or self.dialect.laws is None:
                msg = f"{self.dialect.name} is not known to tell the log-probabilities of a prompt"
                raise PlanError(msg)
            payload = self.dialect.rescored(ask, trace.token_ids, top) | dict(self.extra)
            body = json_of(self._called(self._endpoint(ask.request), "POST", self.dialect.path, payload, what), what)
            return self.dialect.laws(body, len(trace.request.prompt_ids))

    def counters(self) -> DecodeCounters:
        """What the server with speculation tells on `/metrics`."""
        self.on.stand()
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
                seed=seed32(request.seed, first) if request.seeded else None,
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
        with _named(ask) as what:
            payload = self.dialect.payload(ask) | dict(self.extra)
            body = json_of(self._called(self._endpoint(request), "POST", self.dialect.path, payload, what), what)
            answers = self.dialect.answers(ask, body)
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
            msg = (
                f"{what}: {where} got no answer within {endpoint.client.timeout.read:.0f} s ({type(error).__name__}); if the "
                "machine is slow and not the engine, give it more with `--option timeout_s=SECONDS`"
            )
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
            if endpoint.server and response.is_server_error:
                msg += f"; {self._fate(endpoint, endpoint.server)}"
            raise kind(msg)
        return response

    def _fate(self, endpoint: Endpoint, server: Server) -> str:
        """What became of a server of ours that answered with an error: one that has lost its engine is given time to end."""
        until = time.monotonic() + _DYING_S
        while server.running and time.monotonic() < until:
            with contextlib.suppress(httpx2.TransportError):
                if endpoint.client.get("/health", timeout=1.0).is_success:
                    break
            time.sleep(_DYING_S / 100)
        return server.obituary() or server.last_words()

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


def _off(request: DecodeRequest) -> DecodeRequest:
    return replace(request, speculation=False, num_samples=1)


@contextlib.contextmanager
def _named(ask: Ask) -> Iterator[str]:
    """Every finding names its request."""
    what = f"request {ask.request.id} (sample {ask.first_sample}, seed {ask.seed})"
    try:
        yield what
    except SubjectError as error:
        if str(error).startswith(what):
            raise
        msg = f"{what}: {error}"
        raise type(error)(msg) from error


def json_of(response: httpx2.Response, what: str) -> Any:  # noqa: ANN401 - somebody else's
    """The body as JSON; `SubjectError` where it is none."""
    try:
        return response.json()
    except ValueError as error:
        msg = f"{what}: the answer is no JSON: {_first_line(response)}"
        raise SubjectError(msg) from error


def _first_line(response: httpx2.Response) -> str:
    line = next((line.strip() for line in response.text.splitlines() if line.strip()), "(no text)")
    return redacted(line)[:_FIRST_LINE]


def make_client(url: str, *, timeout_s: float) -> httpx2.Client:
    """A client of one server, with the key in its headers; a loopback server is asked directly, whatever the proxies."""
    if not is_address(url):
        msg = f"{url!r} is no url of a server; it begins with http:// or https://, and its port is a number"
        raise PlanError(msg)
    key = os.environ.get(API_KEY, "")
    try:
        return httpx2.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=urlsplit(url).hostname not in {LOOPBACK, "localhost", "::1"},
        )
    except (httpx2.InvalidURL, ImportError, ValueError) as error:  # a proxy of SOCKS wants a package
        msg = f"no client can be made for {url!r} ({type(error).__name__}); look at it, at the proxies of the environment and at {API_KEY}"
        raise PlanError(msg) from error
