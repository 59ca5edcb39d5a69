"""The tokenizer layer, captured: its serialisation piece by piece, and what it does to texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specverify.checks.compatibility import PROVOKING_TEXTS
from specverify.golden.records import Encoding, TokenizerFacts
from specverify.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from specverify.models.loading import LoadedModel
    from specverify.records import Prompt

__all__ = ["PARTS", "encoded_prompt", "rendered", "tokenizer_facts"]

PARTS = (
    "normalizer",
    "pre_tokenizer",
    "model",
    "vocab",
    "merges",
    "added_tokens",
    "post_processor",
    "decoder",
)
"""Pieces of a serialised tokenizer, in the order in which they act on a text; `model` is its settings."""

_ROLES = ("bos", "eos", "pad", "unk")


def tokenizer_facts(loaded: LoadedModel) -> TokenizerFacts:
    """Everything that decides which ids a text becomes."""
    tokenizer = loaded.tokenizer
    before, after = _around(tokenizer)
    return TokenizerFacts(
        kind=type(tokenizer).__name__,
        files_sha256=fingerprint(loaded).tokenizer_sha256,
        parts=_parts(tokenizer),
        special_tokens=_special_tokens(tokenizer),
        before=before,
        after=after,
        chat_template=_template(tokenizer),
        probes=tuple(_encoding(tokenizer, text, special=False) for text in PROVOKING_TEXTS),
    )


def _parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):  # written in Python: its vocabulary is all that it shows
        return {"vocab": _canonical(tokenizer.get_vocab())}
    serialised: dict[str, Any] = json.loads(backend.to_str())
    model = dict(serialised.pop("model", None) or {})
    vocab, merges = model.pop("vocab", None), model.pop("merges", None) or []
    pieces = {**serialised, "model": model, "vocab": _by_id(vocab), "merges": [_merge(each) for each in merges]}
    pieces["added_tokens"] = _added(serialised.get("added_tokens") or [])
    return {part: _canonical(pieces.get(part)) for part in PARTS}


def _by_id(vocab: object) -> object:
    """A vocabulary as id → token, or as it is where ids are places."""
    if isinstance(vocab, dict):
        return {str(number): token for token, number in sorted(vocab.items(), key=lambda item: item[1])}
    return vocab


def _merge(merge: object) -> str:
    """`"a b"` and `["a", "b"]` are the same; releases of tokenizers write either."""
    return " ".join(map(str, merge)) if isinstance(merge, (list, tuple)) else str(merge)


def _added(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {token["content"]: {key: value for key, value in token.items() if key != "content"} for token in tokens}


def _canonical(value: object) -> str:
    """JSON without empty values: a release that writes a new key with its old default changes nothing."""
    return json.dumps(_without_empty(value), sort_keys=True, ensure_ascii=False)


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, False, "", [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    named: dict[str, str] = {}
    for role in _ROLES:
        token = getattr(tokenizer, f"{role}_token", None)
        if token is not None:
            named[role] = f"{token} ({getattr(tokenizer, f'{role}_token_id')})"
    extra = sorted(set(map(int, tokenizer.all_special_ids)))
    return named | {"all": " ".join(map(str, extra))}


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that encoding puts before and after a text."""
    bare, full = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    places = range(len(full) - len(bare) + 1)
    start = next((place for place in places if full[place : place + len(bare)] == bare), 0)
    return tuple(map(int, full[:start])), tuple(map(int, full[start + len(bare) :]))


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return "" if template is None else template if isinstance(template, str) else _canonical(template)


def _encoding(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> Encoding:
    ids = tuple(map(int, tokenizer.encode(text, add_special_tokens=special, verbose=False)))
    return Encoding(
        text=text,
        ids=ids,
        offsets=_offsets(tokenizer, text, special=special),
        round_trip=str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
    )


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> tuple[int, ...]:
    if not getattr(tokenizer, "is_fast", False):
        return ()
    found: Mapping[str, Any] = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    return tuple(int(place) for both in found["offset_mapping"] for place in both)


def encoded_prompt(loaded: LoadedModel, prompt: Prompt) -> Encoding:
    """A text with the special tokens that its tokenizer puts there; a conversation as the template renders it."""
    if prompt.messages:
        text = rendered(loaded, prompt)
        return _encoding(loaded.tokenizer, text, special=False)
    return _encoding(loaded.tokenizer, prompt.text, special=True)


def rendered(loaded: LoadedModel, prompt: Prompt) -> str:
    """What the chat template makes of a prompt, up to the answer; empty without a template, or where it refuses."""
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    turns = turns or [{"role": "user", "content": prompt.text}]
    if not _template(loaded.tokenizer):
        return ""
    try:
        return str(loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # noqa: BLE001 - a template is a program of somebody else's: that it fails is its outcome
        return f"refused: {type(error).__name__}: {error}"
