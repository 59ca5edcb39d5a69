"""Secrets that stand in addresses, headers and tokens are never written: one function, at every edge that writes.

It is applied to each text of a certificate, of a checkpoint and of a log line, so no place has to remember it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["is_address", "redacted", "without_secrets"]

Record = TypeVar("Record")

_HIDDEN = "***"
_NAMES = (
    r"(?:[\w-]*[-_])?(?:\w*token|secret|pass(?:w(?:or)?d|phrase)?|pwd?|jwt|signature|credential|"
    r"api[_-]?key|access[_-]?key|key|sig|auth)"
)
_PATTERNS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^/\s'\"]{1,4000}@", re.IGNORECASE), rf"\1{_HIDDEN}@"),
    # a password with a slash in it, where what stands before the slash is no port
    (re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^/@\s'\"]{1,200}:(?!\d{1,5}/)[^\s'\"]{1,4000}@", re.IGNORECASE), rf"\1{_HIDDEN}@"),
    # an address that lacks its scheme
    (re.compile(r"(?<![\w/.+-])[\w.+-]{1,64}:[^/\s'\"]{1,200}(?=@[\w.-]{1,200}(?::\d|/))"), _HIDDEN),
    (re.compile(rf"([?&;#]{_NAMES}=)[^&\s'\"#;]+", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(rf"(--{_NAMES}[= ])[^\s'\"-][^\s'\"]*", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(rf"(--option[= ]['\"]?{_NAMES}=)[^\s'\"]+", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(r"(\b[A-Z0-9_]{0,60}_(?:TOKEN|KEY|SECRET|PASSWORD)=['\"]?)[^\s'\"]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(\b(?:Bearer|bearer|Basic)\s+)[\w+/.~=-]{16,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"((?:authorization|x-api-key|api[_-]key|password)['\"]?\s*[:=]\s*['\"]?(?:(?:Bearer|Basic)\s+)?)[^\s'\",]{4,}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|nvapi-|gsk_|xai-|r8_|pypi-|AIza|AKIA)[\w-]{16,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), _HIDDEN),
)  # fmt: skip


def redacted(text: str) -> str:
    """The text without passwords in addresses, secrets in queries and headers, and well-known kinds of tokens.

    >>> redacted("https://me:hunter2@host/v1?token=abc&n=1")
    'https://***@host/v1?token=***&n=1'
    """
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def is_address(url: str) -> bool:
    """Whether it is one of http: what is none is given to no client, whose error would repeat a part of a password."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number: a password with a slash in it
        return False


def without_secrets(record: Record) -> Record:
    """The same record with every text in it redacted."""
    return _mapped(record)  # type: ignore[no-any-return]  # the same kind of record comes back


def _mapped(value: Any) -> Any:  # noqa: ANN401 - whatever a record holds
    if isinstance(value, str):
        return redacted(value) if type(value) is str else value  # a StrEnum has none
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{each.name: _mapped(getattr(value, each.name)) for each in dataclasses.fields(value)}
        )
    if isinstance(value, Mapping):
        return {key: _mapped(item) for key, item in value.items()}
    return tuple(map(_mapped, value)) if isinstance(value, tuple) else value
