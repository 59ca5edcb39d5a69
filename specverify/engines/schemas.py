"""Small JSON schemas whose texts can be counted, so that the law of a text under each is known.

They need no more than digits, the letters a to f and JSON's own characters, and no space: the calibration pair has those.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

__all__ = ["SCHEMAS", "texts_of"]

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": ["ab", "ad", "b", "cafe"]},
    {"type": "array", "items": {"enum": [1, 2, 12]}, "minItems": 2, "maxItems": 2},
    {
        "type": "object",
        "properties": {"a": {"enum": [0, 7]}, "b": {"enum": ["c", "d"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
"""A choice at the first letter and later; an item that begins as another; keys, which are forced."""


def texts_of(schema: dict[str, Any]) -> tuple[str, ...]:
    """Every text without spaces that obeys one of `SCHEMAS`, keys in the schema's order.

    >>> texts_of({"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 1})
    ('[1]', '[2]')
    """
    if "enum" in schema:
        return tuple(json.dumps(value) for value in schema["enum"])
    if schema["type"] == "array":
        rows = product(texts_of(schema["items"]), repeat=schema["maxItems"])
        return tuple(f"[{','.join(row)}]" for row in rows)
    named = [[f'"{name}":{text}' for text in texts_of(its)] for name, its in schema["properties"].items()]
    return tuple(f"{{{','.join(row)}}}" for row in product(*named))
