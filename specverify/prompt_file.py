"""Prompts as JSON lines: texts, or conversations that the target's own chat template renders."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from specverify.codec import nearest, read_text, require_shallow, without_repeats
from specverify.errors import PromptError
from specverify.records import Message, Prompt

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_prompts", "require_text"]

_MOST_CHARACTERS = 4_000_000  # of one text
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_KEYS = ("id", "domain", "text", "messages")
_ROLES = ("system", "user", "assistant")


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Prompts from JSON lines: `{"text": …}` or `{"messages": [{"role": "user", "content": …}]}`, one a line.

    `id` and `domain` are optional; empty lines are skipped. Raises `PromptError` with the line for whatever is not such a
    prompt.
    """
    text = read_text(path, "the prompt file", PromptError)
    lines: dict[str, int] = {}
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            prompt = _prompt(line, default_id=f"prompt-{len(prompts) + 1:04}", place=f"line {number} of {path}")
            if prompt.id in lines:
                msg = f"line {number} of {path} has the id {prompt.id!r}, which line {lines[prompt.id]} has too"
                raise PromptError(msg)
            lines[prompt.id] = number
            prompts.append(prompt)
    if not prompts:
        msg = f'{path} holds no prompt; write one JSON object a line, such as {{"text": "Hello"}}'
        raise PromptError(msg)
    return tuple(prompts)


def _prompt(line: str, *, default_id: str, place: str) -> Prompt:
    require_shallow(line, place, PromptError)
    try:
        raw = json.loads(line, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        msg = f"{place} is not JSON: {error}"
        raise PromptError(msg) from error
    if not isinstance(raw, dict):
        msg = f'{place} is not an object; write one {{"text": …}} a line'
        raise PromptError(msg)
    for key in raw.keys() - _KEYS:
        msg = f"{place} has the unknown key {key[:80]!r}; {nearest(key, _KEYS)}"
        raise PromptError(msg)
    if ("text" in raw) == ("messages" in raw):
        msg = f"{place} has {'both text and messages; keep one' if 'text' in raw else 'no text'}"
        raise PromptError(msg)
    found = {"id": default_id, "domain": "default"} | raw
    messages = _messages(found.pop("messages"), place) if "messages" in raw else ()
    for key, value in found.items():
        require_text(value, f"{place}: the {key}")
    return Prompt(**{"text": "", **found}, messages=messages)


def _messages(raw: object, place: str) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        msg = f'{place}: messages is not a list of {{"role": …, "content": …}}'
        raise PromptError(msg)
    messages = []
    for number, each in enumerate(raw, start=1):
        if not isinstance(each, dict) or set(each) != {"role", "content"}:
            msg = f"{place}: message {number} does not have just a role and a content"
            raise PromptError(msg)
        if each["role"] not in _ROLES:
            msg = f"{place}: message {number} has the role {each['role']!r:.80}; known: {', '.join(_ROLES)}"
            raise PromptError(msg)
        require_text(each["content"], f"{place}: the content of message {number}")
        messages.append(Message(each["role"], each["content"]))
    return tuple(messages)


def require_text(value: object, what: str) -> None:
    """Raise `PromptError` for what no tokenizer makes a prompt of."""
    fault = ""
    if not isinstance(value, str):
        fault = "is not a string"
    elif not value.strip():
        fault = "is empty"
    elif len(value) > _MOST_CHARACTERS:
        fault = f"is longer than {_MOST_CHARACTERS:,} characters"
    elif _LONE_SURROGATE.search(value):
        fault = "holds half of a surrogate pair, which no tokenizer reads"
    if fault:
        msg = f"{what} {fault}"
        raise PromptError(msg)
