"""Answers of servers as text: how a stream is asked for and put together, and where a JSON schema goes.

A stream is put together into the body that the same server gives whole, so that both are read by the dialect alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specverify.engines.dialect import part
from specverify.errors import SubjectError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TEXTS", "TextDialect", "events_of"]

_LINE_END = re.compile(r"\r\n|\r|\n")
"""Of a stream of events; what else Unicode ends a line with may stand inside JSON."""


@dataclass(frozen=True, kw_only=True)
class TextDialect:
    """What one kind of server calls streams, texts and schemas."""

    path: str
    """Of a stream."""
    schema: Callable[[dict[str, Any], Any], dict[str, Any]]
    """A body with a JSON schema in it."""
    text: Callable[[Any], str]
    """Of a whole answer."""
    pieces: Callable[[Sequence[Any]], list[str]]
    """Of a stream's events."""
    body: Callable[[Sequence[Any], str], Any]
    """The whole answer, from the events and their text."""
    last: str = ""
    """What must end a stream, where the dialect says so."""


def events_of(stream: str, last: str) -> list[Any]:
    """The JSON of each `data:` line. Raises `SubjectError` for an error among them, nonsense, or a stream that breaks off."""
    lines = [line.partition(":") for line in _LINE_END.split(stream) if line.startswith(("data:", "error:"))]
    told = [(kind, text.strip()) for kind, _, text in lines]
    if last and (not told or told[-1][1] != last):
        msg = f"the stream ends without {last}"
        raise SubjectError(msg)
    events = []
    for kind, text in told[: len(told) - bool(last)]:
        try:
            event = json.loads(text)
        except ValueError as error:
            msg = f"a line of the stream is no JSON: {text[:100]}"
            raise SubjectError(msg) from error
        if kind == "error" or (isinstance(event, dict) and "error" in event):
            msg = f"the stream tells an error: {text[:200]}"
            raise SubjectError(msg)
        events.append(event)
    if not events:
        msg = "the stream is empty"
        raise SubjectError(msg)
    return events


def _joined(lists: Sequence[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]


# ------------------------------------------------------------------------------------------------------------- vLLM


def _vllm_body(events: Sequence[Any], text: str) -> Any:  # noqa: ANN401 - JSON of somebody else
    choices = [part(event, "choices", 0) for event in events if part(event, "choices")]
    ids = _joined([part(choice, "token_ids") or [] for choice in choices])
    return {"choices": [choices[-1] | {"text": text, "token_ids": ids, "logprobs": None}]}


# ----------------------------------------------------------------------------------------------------------- SGLang


def _sglang_one(body: Any) -> Any:  # noqa: ANN401 - as above
    return body[0] if isinstance(body, list) and body else body


def _sglang_added(events: Sequence[Any], field: str) -> list[Any]:
    """What each event adds to a field: it holds the whole so far by default, and with `--stream-output` what is new.

    Which of the two, the last event tells: it counts the tokens of the whole.
    """
    values = [part(event, field) for event in events]
    last = len(part(events[-1], "output_ids"))
    if part(events[-1], "meta_info").get("completion_tokens", last) != last:
        return values
    return [value[len(before) :] for before, value in pairwise([values[0][:0], *values])]


def _sglang_body(events: Sequence[Any], text: str) -> Any:  # noqa: ANN401 - as above
    ids = _joined(_sglang_added(events, "output_ids"))
    return {**events[-1], "text": text, "output_ids": ids}


# -------------------------------------------------------------------------------------------------------- llama.cpp


def _llamacpp_body(events: Sequence[Any], text: str) -> Any:  # noqa: ANN401 - as above
    ids = _joined([event.get("tokens") or [] for event in events])
    return {**events[-1], "content": text, "tokens": ids, "completion_probabilities": []}


# -------------------------------------------------------------------------------------------------------------- TGI


def _tgi_pieces(events: Sequence[Any]) -> list[str]:
    return ["" if part(event, "token").get("special") else str(part(event, "token", "text")) for event in events]


def _tgi_body(events: Sequence[Any], text: str) -> Any:  # noqa: ANN401 - as above
    details = part(events[-1], "details") or {}
    return {"generated_text": text, "details": {**details, "tokens": [part(event, "token") for event in events]}}


def _with(body: dict[str, Any], place: str, field: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    return {**body, place: {**body[place], field: value}}


TEXTS: dict[str, TextDialect] = {
    "vllm": TextDialect(
        path="/v1/completions",
        schema=lambda body, schema: {**body, "structured_outputs": {"json": schema}},
        text=lambda body: str(part(body, "choices", 0, "text")),
        pieces=lambda events: [str(part(event, "choices", 0, "text")) for event in events if part(event, "choices")],
        body=_vllm_body,
        last="[DONE]",
    ),
    "sglang": TextDialect(
        path="/generate",
        schema=lambda body, schema: _with(body, "sampling_params", "json_schema", json.dumps(schema)),
        text=lambda body: str(part(_sglang_one(body), "text")),
        pieces=lambda events: _sglang_added(events, "text"),
        body=_sglang_body,
        last="[DONE]",
    ),
    "llamacpp": TextDialect(
        path="/completion",
        schema=lambda body, schema: {**body, "json_schema": schema},
        text=lambda body: str(part(body, "content")),
        pieces=lambda events: [str(part(event, "content")) for event in events],
        body=_llamacpp_body,
    ),
    "tgi": TextDialect(
        path="/generate_stream",
        schema=lambda body, schema: _with(body, "parameters", "grammar", {"type": "json", "value": schema}),
        text=lambda body: str(part(_sglang_one(body), "generated_text")),
        pieces=_tgi_pieces,
        body=_tgi_body,
    ),
}
"""By the name of the dialect."""
