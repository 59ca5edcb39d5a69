"""Goldens on disk: `golden.json`, and beside it the arrays and the tokenizer's pieces. All of them, or the old ones."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import lzma
import os
import secrets
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.numpy import load, save

from specverify.codec import dump, load_as, read_text
from specverify.errors import OutputError
from specverify.golden.records import GOLDEN_SCHEMA_VERSION, Golden, Recording

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ARRAYS", "GOLDEN", "TOKENIZER", "read_recording", "recorded", "write_recording"]

GOLDEN = "golden.json"
ARRAYS = "arrays.safetensors"
TOKENIZER = "tokenizer.json.xz"
_MOST_BYTES = 256 * 1024 * 1024  # of each file
_MOST_UNPACKED_BYTES = 64 * 1024 * 1024  # the tokenizer of the largest known vocabulary has about a third of it


def recorded(folder: Path) -> bool:
    """Whether a golden lies there."""
    return (folder / GOLDEN).is_file()


def write_recording(folder: Path, recording: Recording) -> None:
    """Put a golden into `folder`, in place of the old one; `golden.json`, which has the others' digests, comes last.

    Raises `OutputError`; then the old golden is still whole, or is refused when it is read.
    """
    tokenizer = recording.golden.tokenizer
    pieces = json.dumps(dict(tokenizer.parts), sort_keys=True, ensure_ascii=False).encode()
    beside = {
        ARRAYS: save(dict(sorted(recording.arrays.items()))),
        TOKENIZER: lzma.compress(pieces, preset=9),
    }
    golden = dataclasses.replace(
        recording.golden,
        tokenizer=dataclasses.replace(tokenizer, parts={}),
        files_sha256={name: hashlib.sha256(content).hexdigest() for name, content in beside.items()},
    )
    contents = beside | {GOLDEN: dump(golden).encode()}
    aside = {name: folder / f".{name}.{secrets.token_hex(6)}.tmp" for name in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with aside[name].open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in contents:
            aside[name].replace(folder / name)
    except OSError as error:
        msg = f"can't write the golden to {folder}: {(error.strerror or str(error)).lower()}; record it again"
        raise OutputError(msg) from error
    finally:
        for path in aside.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read_recording(folder: Path, *, command: str) -> Recording:
    """The golden in `folder`. Raises `OutputError` with `command`, which records it, for one that is missing or too old."""
    file = folder / GOLDEN
    if not file.is_file():
        msg = f"there is no golden in {folder}; record one: {command}"
        raise OutputError(msg)
    text = read_text(file, "the golden", OutputError)
    _require_version(text, folder, command)
    golden = load_as(Golden, text, source=str(file))
    if set(golden.files_sha256) != {ARRAYS, TOKENIZER}:  # no other file is opened, wherever it lies
        msg = f"{file} names other files than {ARRAYS} and {TOKENIZER}; restore it, or record it again: {command}"
        raise OutputError(msg)
    asked = (golden.num_speculative_tokens in range(1, 65), golden.max_new_tokens > 0, 0 <= golden.seed < 2**64)
    if not (all(asked) and golden.prompts and golden.provenances):
        msg = f"{file} holds what no golden has been recorded with; restore it, or record it again: {command}"
        raise OutputError(msg)
    contents = {}
    for name, expected in golden.files_sha256.items():
        try:
            contents[name] = _bounded(folder / name)
        except OSError as error:
            msg = f"the golden in {folder} lacks {name}; restore it, or record it again: {command}"
            raise OutputError(msg) from error
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            msg = f"{folder / name} is not the file that {GOLDEN} was written with; restore it, or record again: {command}"
            raise OutputError(msg)
    try:
        arrays = load(contents[ARRAYS])
        parts = json.loads(lzma.LZMADecompressor().decompress(contents[TOKENIZER], max_length=_MOST_UNPACKED_BYTES))
    except (KeyError, ValueError, lzma.LZMAError, SafetensorError) as error:
        msg = f"the golden in {folder} can't be read ({type(error).__name__}); record it again: {command}"
        raise OutputError(msg) from error
    tokenizer = dataclasses.replace(golden.tokenizer, parts=parts)
    return Recording(golden=dataclasses.replace(golden, tokenizer=tokenizer), arrays=arrays)


def _bounded(file: Path) -> bytes:
    """What a file holds, as far as a golden's may; more is not what was recorded, so its digest says so."""
    if file.is_fifo():
        msg = "a pipe has no end"
        raise OSError(msg)
    with file.open("rb") as opened:
        return opened.read(_MOST_BYTES)


def _require_version(text: str, folder: Path, command: str) -> None:
    """Raise `OutputError` for a golden of another schema."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return  # said better by whoever reads the record
    found = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(found, int) and found != GOLDEN_SCHEMA_VERSION:
        newer = found > GOLDEN_SCHEMA_VERSION
        advice = "upgrade specverify" if newer else f"record it again: {command}"
        msg = f"the golden in {folder} has schema version {found}, this specverify reads {GOLDEN_SCHEMA_VERSION}; {advice}"
        raise OutputError(msg)
