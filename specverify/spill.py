"""Evidence on disk: columns and traces of a run in one temporary file, read again one column or one round at a time.

Note [Spill]: a scored token has some forty float64 columns, and its trace Python objects on top; a long run would hold
gigabytes of them. So what was answered goes to a file without a name, which the system frees however the run ends, and checks read
the column that they are at. The numbers are the same bits, so no verdict depends on where they lay.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import IO, TYPE_CHECKING, Any, overload

import numpy as np

from specverify.errors import OutputError
from specverify.records import DecodeStep, DecodeTrace, FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from specverify.records import DecodeRequest

__all__ = ["Columns", "Spill", "Traces"]

_REASONS = tuple(FinishReason)


def _close(file: IO[bytes]) -> None:
    """What a full disk didn't take is given up; whoever put it there was told."""
    with contextlib.suppress(OSError):
        file.close()


class Spill:
    """One file that arrays are put at the end of."""

    def __init__(self, folder: Path | None = None) -> None:
        """In `folder`, or where the system keeps temporary files."""
        self._advice = "free some space" if folder is not None else "free some space, or set TMPDIR to another disk"
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the run; it has no name
        except OSError as error:
            raise self._refusal(error) from error
        self._end = 0
        weakref.finalize(self, _close, self._file)

    def put(self, values: NDArray[Any]) -> Kept:
        """Write an array; raises `OutputError` when the disk is full."""
        kept = Kept(self, self._end, len(values), values.dtype)
        try:
            self._file.seek(self._end)
            self._file.write(np.ascontiguousarray(values).tobytes())
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from error
        self._end += values.nbytes
        return kept

    def read_into(self, values: NDArray[Any], offset: int) -> None:
        """Fill an array from where it was put; raises `OutputError` when the disk doesn't give it back."""
        try:
            self._file.seek(offset)
            content = self._file.read(values.nbytes)
        except OSError as error:
            raise self._refusal(error) from error
        if len(content) < values.nbytes:
            raise self._refusal(OSError(errno.EIO, f"{values.nbytes:,} bytes were kept and {len(content):,} came back"))
        values[:] = np.frombuffer(content, values.dtype)

    def _refusal(self, error: OSError) -> OutputError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = self._advice if full else "check that disk"
        return OutputError(f"can't keep the evidence on disk: {(error.strerror or str(error)).lower()}; {advice}")


@dataclass(frozen=True, eq=False)
class Kept:
    """An array in a spill."""

    spill: Spill
    offset: int
    length: int
    dtype: np.dtype[Any]

    def read(self) -> NDArray[Any]:
        """The array, as it was."""
        values = np.empty(self.length, self.dtype)
        self.spill.read_into(values, self.offset)
        return values


class Columns(Mapping[str, "NDArray[np.float64]"]):
    """Columns in pieces on disk, one after the other; each is read when it is asked for."""

    def __init__(
        self, pieces: Mapping[str, tuple[tuple[Kept, int], ...]], mask: NDArray[np.bool_] | None = None
    ) -> None:
        """A piece is an array and what is added to it; `mask` picks rows of all pieces together."""
        self._pieces, self._mask = pieces, mask

    @classmethod
    def put(cls, columns: Mapping[str, NDArray[np.float64]], spill: Spill) -> Columns:
        """Write columns to disk."""
        return cls({name: ((spill.put(values), 0),) for name, values in columns.items()})

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """A column, read from disk."""
        pieces = self._pieces[name]
        values = np.empty(sum(piece.length for piece, _ in pieces), np.float64)
        start = 0
        for piece, shift in pieces:
            part = values[start : start + piece.length]
            piece.spill.read_into(part, piece.offset)
            if shift:
                part += shift
            start += piece.length
        return values if self._mask is None else values[self._mask]

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self._pieces)

    def __len__(self) -> int:
        """How many columns."""
        return len(self._pieces)

    def rows(self) -> int:
        """Entries of each column, without reading any."""
        if self._mask is not None:
            return int(self._mask.sum())
        return sum(piece.length for piece, _ in next(iter(self._pieces.values()), ()))

    def where(self, mask: NDArray[np.bool_]) -> Columns:
        """The rows of a mask."""
        if mask.all():
            return self
        if self._mask is None:
            return Columns(self._pieces, mask)
        both = self._mask.copy()
        both[both] = mask
        return Columns(self._pieces, both)

    def shifted(self, shift: Mapping[str, int]) -> Columns:
        """With a number added to some columns."""
        pieces = {
            name: tuple((piece, by + shift.get(name, 0)) for piece, by in mine) for name, mine in self._pieces.items()
        }
        return Columns(pieces, self._mask)

    def then(self, other: Columns) -> Columns:
        """Both, one after the other, the names that both have."""
        pieces = {name: mine + other._pieces[name] for name, mine in self._pieces.items() if name in other._pieces}
        if self._mask is None and other._mask is None:
            return Columns(pieces)
        return Columns(pieces, np.concatenate((self._whole_mask(), other._whole_mask())))

    def _whole_mask(self) -> NDArray[np.bool_]:
        return np.ones(self.rows(), dtype=bool) if self._mask is None else self._mask


class _Packed:
    """The traces of one round on disk; the requests stay."""

    def __init__(self, traces: Sequence[DecodeTrace], spill: Spill) -> None:
        self.requests = tuple(trace.request for trace in traces)
        steps = [step for trace in traces for step in trace.steps]
        arrays: dict[str, list[int] | list[float]] = {
            "sample": [trace.sample for trace in traces],
            "finish": [_REASONS.index(trace.finish) for trace in traces],
            "num_tokens": [len(trace.token_ids) for trace in traces],
            "num_steps": [len(trace.steps) for trace in traces],
            "num_logprobs": [len(trace.logprobs) for trace in traces],
            "tokens": [token for trace in traces for token in trace.token_ids],
            "drafted": [step.num_draft_tokens for step in steps],
            "accepted": [step.num_accepted_tokens for step in steps],
            "emitted": [step.num_emitted_tokens for step in steps],
            "num_drafts": [len(step.draft_token_ids) for step in steps],
            "drafts": [token for step in steps for token in step.draft_token_ids],
        }
        self._kept = {name: spill.put(np.array(values, dtype=np.int64)) for name, values in arrays.items()}
        logprobs = [value for trace in traces for value in trace.logprobs]
        self._kept["logprobs"] = spill.put(np.array(logprobs, dtype=np.float64))

    def unpacked(self) -> tuple[DecodeTrace, ...]:
        """As they were."""
        read = {name: kept.read().tolist() for name, kept in self._kept.items()}
        drafts = _split(read["drafts"], read["num_drafts"])
        numbers = zip(read["drafted"], read["accepted"], read["emitted"], drafts, strict=True)
        steps = _split([DecodeStep(*each) for each in numbers], read["num_steps"])
        tokens, logprobs = (_split(read[name], read[f"num_{name}"]) for name in ("tokens", "logprobs"))
        return tuple(
            DecodeTrace(
                request=request, sample=sample, token_ids=ids, finish=_REASONS[finish], steps=taken, logprobs=told
            )
            for request, sample, finish, ids, taken, told in zip(
                self.requests, read["sample"], read["finish"], tokens, steps, logprobs, strict=True
            )
        )


def _split(flat: Sequence[Any], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    ends = list(accumulate(lengths, initial=0))
    return [tuple(flat[start:end]) for start, end in pairwise(ends)]


class Traces(Sequence[DecodeTrace]):
    """Traces on disk, round by round; one round at a time is held as objects."""

    def __init__(self, rounds: tuple[_Packed, ...]) -> None:
        """Of rounds that were put on disk."""
        self._rounds = rounds
        self._starts = list(accumulate((len(each.requests) for each in rounds), initial=0))
        self._last: tuple[int, tuple[DecodeTrace, ...]] = -1, ()

    @classmethod
    def put(cls, traces: Sequence[DecodeTrace], spill: Spill) -> Traces:
        """Write traces to disk."""
        return cls((_Packed(traces, spill),))

    def requests(self) -> list[DecodeRequest]:
        """The request of each trace, without reading it."""
        return [request for each in self._rounds for request in each.requests]

    def then(self, other: Traces) -> Traces:
        """Both, one after the other."""
        return Traces(self._rounds + other._rounds)

    def __len__(self) -> int:
        """How many."""
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> DecodeTrace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DecodeTrace, ...]: ...
    def __getitem__(self, index: int | slice) -> DecodeTrace | tuple[DecodeTrace, ...]:
        """A trace, or a tuple of them, read from disk."""
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = range(len(self))[index]
        number = bisect_right(self._starts, place) - 1
        if self._last[0] != number:
            self._last = number, self._rounds[number].unpacked()
        return self._last[1][place - self._starts[number]]

    def __iter__(self) -> Iterator[DecodeTrace]:
        """In order, round by round."""
        for each in self._rounds:
            yield from each.unpacked()
