"""A local server that answers what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODELS = {"data": [{"id": "tiny"}]}


class FakeServer:
    """`answer` makes of a request's path and body a status and a body; raising `ConnectionError` drops the connection."""

    def __init__(self, answer: Callable[[str, Any], tuple[int, Any]]) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/health":
                    self._send(200, {})
                elif self.path == "/v1/models":
                    self._send(200, MODELS)
                else:
                    self._answer(None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                try:
                    self._answer(body)
                finally:
                    with outer._lock:
                        outer._now -= 1

            def _answer(self, body: Any) -> None:
                try:
                    self._send(*outer.answer(self.path, body))
                except ConnectionError:
                    self.close_connection = True

            def _send(self, status: int, body: Any) -> None:
                text = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever asked may have gone
                    self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextlib.contextmanager
def faking(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[FakeServer]:
    fake = FakeServer(answer)
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()
