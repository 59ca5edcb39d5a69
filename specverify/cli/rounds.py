"""Answered rounds on disk, so that an interrupted check goes on at the round where it was: arrays and JSON, never a pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import zipfile
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from specverify.errors import OutputError
from specverify.records import DecodeStep, DecodeTrace, FinishReason
from specverify.scoring import ScoredTraces

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.checks.check import Round

__all__ = ["ROUNDS", "Rounds"]

ROUNDS = "rounds"
"""The folder's name beside the certificate."""


class Rounds:
    """One file a round in a folder of the run; rounds of another run are thrown away."""

    def __init__(self, folder: Path, run: str, *, resume: bool) -> None:
        """Take over what a run with the same key has answered."""
        self._outer = folder / ROUNDS
        self._folder = self._outer / run[:32]
        if self._outer.is_dir() and not (resume and self._folder.is_dir()):
            shutil.rmtree(self._outer, ignore_errors=True)

    def get(self, key: str, asked: Round) -> ScoredTraces | None:
        """The answers to a round, if they were kept whole."""
        try:
            content = io.BytesIO((self._folder / f"{key}.npz").read_bytes())
            with np.load(content, allow_pickle=False) as arrays:
                traces = _traces(json.loads(arrays["traces"].tobytes()), asked)
                return ScoredTraces(traces, _named(arrays, "column:"), _named(arrays, "ratio:"))
        except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile):
            return None

    def put(self, key: str, asked: Round, scored: ScoredTraces) -> None:
        """Keep the answers; raises `OutputError` when they can't be written."""
        numbers = {request: place for place, request in enumerate(asked)}
        plain = [
            (numbers[t.request], t.sample, t.token_ids, t.finish, [astuple(step) for step in t.steps], t.logprobs)
            for t in scored.traces
        ]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            allow_pickle=False,
            traces=np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8),
            **{f"column:{name}": values for name, values in scored.columns.items()},
            **{f"ratio:{name}": values for name, values in scored.fault_ratios.items()},
        )
        aside = self._folder / f".{secrets.token_hex(6)}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(buffer.getbuffer())
            os.replace(aside, self._folder / f"{key}.npz")  # noqa: PTH105 - as `codec` does: whole or not at all
        except OSError as error:
            msg = (
                f"can't write {self._folder}: {(error.strerror or str(error)).lower()}; free some space, then run again"
            )
            raise OutputError(msg) from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is complete."""
        shutil.rmtree(self._outer, ignore_errors=True)


def _named(arrays: np.lib.npyio.NpzFile, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}


def _traces(plain: list[list[Any]], asked: Round) -> tuple[DecodeTrace, ...]:
    return tuple(
        DecodeTrace(
            request=asked[request],
            sample=sample,
            token_ids=tuple(token_ids),
            finish=FinishReason(finish),
            steps=tuple(DecodeStep(step[0], step[1], step[2], tuple(step[3])) for step in steps),
            logprobs=tuple(logprobs),
        )
        for request, sample, token_ids, finish, steps, logprobs in plain
    )
