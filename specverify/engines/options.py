"""The options of an engine, read and refused in one way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specverify.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options", "json_object"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Names, defaults, and what values may be; all of them texts, as a command line gives them."""

    engine: str
    defaults: Mapping[str, str]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: frozenset[str] = frozenset()
    """Whole numbers of at least 1; empty where that is the default."""
    numbers: frozenset[str] = frozenset()
    """Positive numbers."""

    def read(self, given: tuple[tuple[str, str], ...]) -> dict[str, str]:
        """The defaults with what is given; `PlanError` that names the option, and what it may be."""
        options = {**self.defaults, **dict(given)}
        if unknown := sorted(set(options) - set(self.defaults)):
            msg = f"the engine {self.engine} has no option '{unknown[0]}'; it may be one of {', '.join(self.defaults)}"
            raise PlanError(msg)
        for name, value in options.items():
            if wanted := self._wanted(name, value):
                msg = f"the option {name} is {value!r}; it must be {wanted}"
                raise PlanError(msg)
        return options

    def _wanted(self, name: str, value: str) -> str:
        """What an option must be, if it isn't."""
        if name in self.choices and value not in self.choices[name]:
            return f"one of {', '.join(self.choices[name])}"
        if value == self.defaults[name]:
            return ""
        if name in self.counts and not (value.isdecimal() and int(value)):
            return "a whole number of at least 1"
        if name in self.numbers and not _positive(value):
            return "a positive number"
        return ""


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def json_object(text: str, name: str) -> dict[str, Any]:
    """An option that holds a JSON object; nothing is an empty one."""
    try:
        table = json.loads(text or "{}")
    except ValueError:
        table = None
    if not isinstance(table, dict):
        msg = f"the option {name} is {text!r}; it must be a JSON object"
        raise PlanError(msg)
    return table
