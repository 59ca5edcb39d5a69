"""The held-out prompts of the embedded pair: works that no model was trained on, and texts made to provoke."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_prompts"]

_PROVOKING = {
    "repetition": (
        "again and again and again and again and again and again",
        "the the the the the the the the the",
        "She said no. She said no. She said no. She said no.",
        "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,",
    ),
    "language": (
        "Il était une fois une princesse qui vivait dans un grand château au bord de la mer.",
        "Es war einmal ein kleines Mädchen, das hatte jedermann lieb, der es nur ansah.",
        "Μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος",
        "学而时习之，不亦说乎？",
    ),
    "chat": (
        "<|user|>Who was the master of Kellynch Hall?\n<|assistant|>",
        "<|user|>Write a function that adds two numbers.\n<|assistant|>def",
        "<|user|>Good morrow, cousin.\n<|assistant|>Is the day so young?\n<|user|>But new struck nine.\n<|assistant|>",
    ),
    "odd": (
        "\t\t\x0b\x0c  \u00a0\u200b\u202e odd spaces and \ufeff marks \x1b[31m",
        "{{{{[[[[((((<<<<%%%%$$$$####@@@@!!!!",
    ),
}


def write_prompts(unseen: dict[str, list[str]], path: Path) -> None:
    """Write the JSON lines; the held-out documents of each domain are taken evenly from the whole work."""
    lines: list[dict[str, str]] = []

    def add(domain: str, texts: list[str]) -> None:
        lines.extend({"id": f"{domain}-{n:02d}", "domain": domain, "text": text} for n, text in enumerate(texts, 1))

    prose = [text for text in unseen["austen"] if '"' not in text]
    dialogue = [text[text.index('"') :] for text in unseen["austen"] if text.count('"') >= 4]
    add("austen", [_words(text, 8 + n % 20) for n, text in enumerate(_evenly(prose, 22))])
    add("dialogue", [_words(text, 10 + n % 12) for n, text in enumerate(_evenly(dialogue, 9))])
    add("shakespeare", [_words(text, 8 + n % 16) for n, text in enumerate(_evenly(unseen["shakespeare"], 10))])
    add("code", [_words(text, 8 + n % 16) for n, text in enumerate(_evenly(unseen["code"], 8))])
    for domain, texts in _PROVOKING.items():
        add(domain, list(texts))
    add("long", [_words(" ".join(prose[start : start + 4]), 160) for start in (5, 60)])
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _evenly(texts: list[str], count: int) -> list[str]:
    return [texts[(2 * n + 1) * len(texts) // (2 * count)] for n in range(count)]


def _words(text: str, count: int) -> str:
    """The first `count` words, their white space kept."""
    return "".join(re.findall(r"\s*\S+", text)[:count])
