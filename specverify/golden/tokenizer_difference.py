"""Two tokenizers, compared: which piece changed first, and a text that shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING

from specverify.golden.records import Change, Encoding, Layer, LayerVerdict
from specverify.golden.tokenizer import PARTS
from specverify.records import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.golden.records import Golden, TokenizerFacts

__all__ = ["encoded_otherwise", "tokenizer_verdict"]

_NAMES = {
    "normalizer": "normaliser",
    "pre_tokenizer": "pre-tokenizer",
    "model": "model settings",
    "vocab": "vocabulary",
    "added_tokens": "added tokens",
    "post_processor": "post-processor",
}
_MOST_NAMED = 5
_AROUND_IDS = 6
"""Ids shown on each side of a first difference."""


@dataclass(frozen=True)
class _Differing:
    """A text that the tokenizers read otherwise."""

    old: Encoding
    new: Encoding


def tokenizer_verdict(old: Golden, new: Golden) -> LayerVerdict:
    """Which piece of the tokenizer changed, first in the order in which they act, and the shortest text that shows it."""
    then, now = old.tokenizer, new.tokenizer
    pieces = [part for part in PARTS if then.parts.get(part) != now.parts.get(part)]
    differing = _differing(old, new)
    if not _means_more(pieces, then, now) and not differing:
        pieces = []
    parts = [_NAMES.get(part, part) for part in pieces]
    parts += ["special tokens"] if then.special_tokens != now.special_tokens else []
    parts += ["BOS/EOS insertion"] if (then.before, then.after) != (now.before, now.after) else []
    templates = _templates(old, new)
    parts += ["chat template"] if templates else []
    if differing and not parts:
        parts = ["library"]  # the files say the same, and it reads them otherwise
    if not parts:
        return LayerVerdict(
            layer=Layer.TOKENIZER,
            change=Change.UNCHANGED,
            verdict=Verdict.PASS,
            summary=f"{len(old.prompts)} prompts, {len(then.probes)} provoking texts and the template give the same ids",
        )
    findings = [*_pieces(pieces, then, now), *_special(then, now), *templates, *_texts(differing, then, now)]
    return LayerVerdict(
        layer=Layer.TOKENIZER,
        change=Change.CAUSE,
        verdict=Verdict.FAIL,
        summary=f"changed: {', '.join(parts)}; {_reach(differing, old)}",
        parts=tuple(parts),
        findings=tuple(findings),
        measurements={
            "texts_encoded_otherwise": len(differing),
            "prompts_encoded_otherwise": encoded_otherwise(old, new),
            "texts": len(then.probes) + len(old.prompts),
        },
        advice=_advice(parts),
    )


def encoded_otherwise(old: Golden, new: Golden) -> int:
    """Prompts that become other ids."""
    return sum(then.encoding.ids != now.encoding.ids for then, now in zip(old.prompts, new.prompts, strict=True))


def _means_more(pieces: list[str], old: TokenizerFacts, new: TokenizerFacts) -> bool:
    """Whether a piece that is written otherwise is another one: not where the files are the same ones."""
    return bool({"vocab", "merges", "added_tokens"} & set(pieces)) or old.files_sha256 != new.files_sha256


def _differing(old: Golden, new: Golden) -> list[_Differing]:
    """Texts with other ids, offsets or round trips; the shortest first."""
    pairs = [
        *zip(old.tokenizer.probes, new.tokenizer.probes, strict=False),
        *((then.encoding, now.encoding) for then, now in zip(old.prompts, new.prompts, strict=True)),
    ]
    found = [_Differing(then, now) for then, now in pairs if then.text == now.text and then != now]
    return sorted(found, key=lambda each: (each.old.ids == each.new.ids, len(each.old.text)))


def _reach(differing: list[_Differing], old: Golden) -> str:
    ids = sum(each.old.ids != each.new.ids for each in differing)
    total = len(old.prompts) + len(old.tokenizer.probes)
    return f"{ids} of {total} texts become other ids" if ids else f"none of {total} texts becomes other ids"


# ------------------------------------------------------------------------------------------------ evidence


def _pieces(pieces: list[str], old: TokenizerFacts, new: TokenizerFacts) -> Iterator[Finding]:
    for part in pieces:
        then, now = (json.loads(facts.parts.get(part, "null")) for facts in (old, new))
        name = _NAMES.get(part, part)
        if part == "merges":
            text = _lists(then or [], now or [], "merges")
        elif part in {"vocab", "added_tokens"} and isinstance(then, dict) and isinstance(now, dict):
            text = _tables(then, now, "ids" if part == "vocab" else "added tokens")
        else:
            text = f"was {_short(then)}, is {_short(now)}"
        yield Finding(text=f"{name}: {text}", place=name)


def _lists(old: list[str], new: list[str], what: str) -> str:
    gone, come = set(old) - set(new), set(new) - set(old)
    if not gone and not come:
        place = next(number for number, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        return (
            f"the same {len(old):,} {what} in another order, from number {place} on: {old[place]!r}, now {new[place]!r}"
        )
    parts = [f"{len(old):,} {what} became {len(new):,}"]
    parts += [f"{len(gone):,} gone: {_some([each for each in old if each in gone])}"] if gone else []
    parts += [f"{len(come):,} new: {_some([each for each in new if each in come])}"] if come else []
    return "; ".join(parts)


def _tables(old: dict[str, object], new: dict[str, object], what: str) -> str:
    other = [key for key in old if key in new and old[key] != new[key]]
    gone, come = [key for key in old if key not in new], [key for key in new if key not in old]
    parts = []
    if other:
        shown = _some([f"{key}: {_short(old[key])} became {_short(new[key])}" for key in other], quote=False)
        parts.append(f"{len(other):,} of {len(old):,} {what} are another one ({shown})")
    parts += [f"{len(gone):,} gone: {_some([_entry(key, old[key]) for key in gone], quote=False)}"] if gone else []
    parts += [f"{len(come):,} new: {_some([_entry(key, new[key]) for key in come], quote=False)}"] if come else []
    return "; ".join(parts)


def _entry(key: str, value: object) -> str:
    return f"{key!r} ({value['id']})" if isinstance(value, dict) and "id" in value else f"{key} {_short(value)}"


def _special(old: TokenizerFacts, new: TokenizerFacts) -> Iterator[Finding]:
    for role in sorted(old.special_tokens.keys() | new.special_tokens.keys()):
        then, now = old.special_tokens.get(role, "none"), new.special_tokens.get(role, "none")
        if then != now:
            name = "ids of all special tokens" if role == "all" else role.upper()
            yield Finding(text=f"{name}: was {then}, is {now}", place="special tokens")
    if (old.before, old.after) != (new.before, new.after):
        text = f"around a text stood {old.before} and {old.after}, now {new.before} and {new.after}"
        yield Finding(text=text, place="BOS/EOS insertion")


def _templates(old: Golden, new: Golden) -> list[Finding]:
    """The template's own text, and the shortest prompt that it renders otherwise."""
    then, now = old.tokenizer.chat_template, new.tokenizer.chat_template
    both = [
        (one, other)
        for one, other in zip(old.prompts, new.prompts, strict=True)
        if one.template_text != other.template_text
    ]
    findings = []
    if then != now:
        shared = len(commonprefix([then, now]))  # noqa: RUF071 - of characters, not of a path
        text = f"differs from character {shared} on: {_short(then[shared:])} became {_short(now[shared:])}"
        findings.append(Finding(text=text, place="chat template"))
    if both:
        one, other = min(both, key=lambda pair: len(pair[0].template_text))
        text = (
            f"{len(both)} of {len(old.prompts)} prompts are rendered otherwise: {_short(one.template_text)} became "
            f"{_short(other.template_text)}; {_first_difference(one.template_ids, other.template_ids)}"
        )
        findings.append(Finding(text=text, place=one.prompt.id))
    return findings


def _texts(differing: list[_Differing], old: TokenizerFacts, new: TokenizerFacts) -> Iterator[Finding]:
    if not differing:
        return
    then, now = differing[0].old, differing[0].new
    shown = f"the text {_short(then.text)}"
    if then.ids != now.ids:
        tokens = [json.loads(facts.parts.get("vocab", "{}")) for facts in (old, new)]
        text = f"{shown}: {_first_difference(then.ids, now.ids, *tokens)}"
    elif then.round_trip != now.round_trip:
        text = f"{shown} has the same ids, but reads back as {_short(now.round_trip)}, not as {_short(then.round_trip)}"
    else:
        place = next((n for n, (a, b) in enumerate(zip(then.offsets, now.offsets, strict=False)) if a != b), 0)
        text = f"{shown} has the same ids, but token {place // 2} stands at other characters"
    yield Finding(text=text, place=_short(then.text))


def _first_difference(old: tuple[int, ...], new: tuple[int, ...], *tokens: object) -> str:
    """Both lists around the first place where they differ."""
    if old == new:
        return "the ids are the same"
    place = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    sides = []
    for ids, table in zip((old, new), tokens or ({}, {}), strict=False):
        named = table.get(str(ids[place])) if isinstance(table, dict) and place < len(ids) else None
        sides.append(f"{_around(ids, place)}{f' ({named!r})' if named else ''}")
    return f"first difference at token {place}: {sides[0]} became {sides[1]}"


def _around(ids: tuple[int, ...], place: int) -> str:
    start, stop = max(0, place - _AROUND_IDS), place + _AROUND_IDS
    inside = ", ".join(map(str, ids[start:stop]))
    return f"[{'…, ' if start else ''}{inside}{', …' if stop < len(ids) else ''}]"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    text = text if len(text) <= 100 else text[:99] + "…"
    return repr(text) if isinstance(value, str) else text


def _some(items: list[str], *, quote: bool = True) -> str:
    shown = ", ".join(repr(each) if quote else each for each in items[:_MOST_NAMED])
    return shown + (f" and {len(items) - _MOST_NAMED:,} more" if len(items) > _MOST_NAMED else "")


def _advice(parts: list[str]) -> str:
    if parts == ["library"]:
        return (
            "the files are the same, so an upgraded library reads them otherwise: pin it, or record again with --update"
        )
    if parts == ["chat template"]:
        return "if the template was meant to change, record again with --update; otherwise restore it"
    return (
        "a target knows the ids that it was trained with: restore the tokenizer files that came with these weights, "
        "or, if weights and tokenizer were meant to change together, record again with --update"
    )
