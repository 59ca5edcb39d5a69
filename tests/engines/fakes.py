"""A local server that answers what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specverify.engines import EngineSettings
from specverify.records import DecodeRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EOS = 31
PLAIN = SamplingParams(max_new_tokens=3, eos_token_ids=(EOS,))
ALL = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.2, min_new_tokens=2, max_new_tokens=6,
    banned_token_ids=((4,), (9,)), eos_token_ids=(EOS,), stop_token_ids=(7,), stop_strings=("ab",),
)  # fmt: skip
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


def request_of(params=PLAIN, **changes) -> DecodeRequest:
    return DecodeRequest(**{"id": "r", "prompt_ids": (1, 2, 3), "params": params, "seed": 5} | changes)


def settings_of(fake, dialect, folder=Path("target"), **options) -> EngineSettings:
    pairs = tuple({"dialect": dialect, **options}.items())
    return EngineSettings(target=folder, url=fake.url, eos_token_ids=(EOS,), options=pairs)


def vllm_choice(ids, reason="length", stop_reason=None, index=0):
    told = {"token_logprobs": [-0.5] * len(ids)}
    return {"index": index, "token_ids": ids, "finish_reason": reason, "stop_reason": stop_reason, "logprobs": told}


def answer_of(dialect: str, ids: list[int], ended: str, n: int = 1):
    """The body in which a server of this dialect hands out these ids."""
    matched = ids[-1] if ended in {"eos", "id"} else "ab"
    if dialect == "vllm":
        reason = "length" if ended == "length" else "stop"
        stop_reason = {"length": None, "eos": None, "id": matched, "word": "ab"}[ended]
        return {"choices": [vllm_choice(ids, reason, stop_reason, index) for index in reversed(range(n))]}
    if dialect == "sglang":
        reason = {"type": "length"} if ended == "length" else {"type": "stop", "matched": matched}
        return {"output_ids": ids, "meta_info": {"finish_reason": reason,
                                                 "output_token_logprobs": [[-0.5, id_, None] for id_ in ids]}}  # fmt: skip
    if dialect == "llamacpp":
        stop_type = {"length": "limit", "eos": "eos", "word": "word"}[ended]
        return {"tokens": ids, "stop_type": stop_type, "completion_probabilities": [{"logprob": -0.5} for _ in ids]}
    reason = {"length": "length", "eos": "eos_token", "word": "stop_sequence"}[ended]
    return {"details": {"finish_reason": reason, "tokens": [{"id": id_, "logprob": -0.5} for id_ in ids]}}


def told_of(dialect: str, ids: list[int], texts: list[str], ended: str):
    """The same with its text: what `answer_of` gives, and the texts of the ids."""
    body, text = answer_of(dialect, ids, ended), "".join(texts)
    if dialect == "vllm":
        body["choices"][0]["text"] = text
    else:
        body[{"sglang": "text", "llamacpp": "content", "tgi": "generated_text"}[dialect]] = text
    return body


def stream_of(dialect: str, blocks: list[list[int]], texts: list[list[str]], ended: str) -> str:
    """The events in which a server of this dialect hands out these blocks of ids: several tokens in one where it can."""
    events: list[Any] = []
    flat, said = [id_ for block in blocks for id_ in block], [text for block in texts for text in block]
    whole = told_of(dialect, flat, said, ended)
    if dialect == "tgi":
        tokens = [{"id": id_, "text": text, "special": id_ == EOS} for id_, text in zip(flat, said, strict=True)]
        events = [{"token": token, "generated_text": None, "details": None} for token in tokens]
        details = {name: value for name, value in whole["details"].items() if name != "tokens"}
        events[-1] |= {"generated_text": "".join(said), "details": details}
    for number, (block, its) in enumerate(zip(blocks, texts, strict=True)):
        last, text = number == len(blocks) - 1, "".join(its)
        if dialect == "vllm":
            reasons = {name: whole["choices"][0][name] if last else None for name in ("finish_reason", "stop_reason")}
            events.append({"choices": [{"index": 0, "text": text, "token_ids": block, **reasons}]})
        elif dialect == "llamacpp":
            events.append({"content": text, "tokens": block, "stop": False})
        elif dialect == "sglang":  # the whole so far
            so_far = [id_ for each in blocks[: number + 1] for id_ in each]
            text = "".join(each for block_texts in texts[: number + 1] for each in block_texts)
            reason = whole["meta_info"]["finish_reason"] if last else None
            meta = {"finish_reason": reason, "completion_tokens": len(so_far)}
            events.append({"text": text, "output_ids": so_far, "meta_info": meta})
    if dialect == "llamacpp":
        events.append({"content": "", "tokens": [], "stop": True, "stop_type": whole["stop_type"]})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if dialect in {"vllm", "sglang"} else "")
