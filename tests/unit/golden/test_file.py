"""A golden on disk comes back as it was, or is refused with the command that records it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specverify.errors import OutputError
from specverify.golden_file import ARRAYS, GOLDEN, TOKENIZER, read_recording, write_recording

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.golden.conftest import Recorded

COMMAND = "specverify golden record --reason TEXT"


def test_it_comes_back_as_it_was(recorded: Recorded, tmp_path: Path) -> None:
    """Every record and every array."""
    write_recording(tmp_path, recorded.recording)
    read = read_recording(tmp_path, command=COMMAND)
    assert read.golden.prompts == recorded.recording.golden.prompts
    assert read.golden.tokenizer == recorded.recording.golden.tokenizer
    assert read.golden.weights == recorded.recording.golden.weights
    assert read.arrays.keys() == recorded.recording.arrays.keys()
    assert all(np.array_equal(value, read.arrays[name]) for name, value in recorded.recording.arrays.items())


def test_two_writes_are_the_same_bytes(recorded: Recorded, tmp_path: Path) -> None:
    """So that a recording without a change is no diff."""
    for name in ("one", "other"):
        write_recording(tmp_path / name, recorded.recording)
    for name in (GOLDEN, ARRAYS, TOKENIZER):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted((GOLDEN, ARRAYS, TOKENIZER))


def test_a_missing_golden_names_the_command(tmp_path: Path) -> None:
    """Which records it."""
    with pytest.raises(OutputError, match=r"there is no golden in .*; record one: specverify golden record"):
        read_recording(tmp_path, command=COMMAND)


@pytest.mark.parametrize(("version", "advice"), [(0, "record it again: specverify"), (9, "upgrade specverify")])
def test_another_schema_says_what_to_do(recorded: Recorded, tmp_path: Path, version: int, advice: str) -> None:
    """An older one is recorded again, a newer one needs a newer specverify."""
    write_recording(tmp_path, recorded.recording)
    table = json.loads((tmp_path / GOLDEN).read_text(encoding="utf-8")) | {"schema_version": version}
    (tmp_path / GOLDEN).write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(OutputError, match=advice):
        read_recording(tmp_path, command=COMMAND)


@pytest.mark.parametrize("name", [ARRAYS, TOKENIZER])
def test_halves_of_two_goldens_are_refused(recorded: Recorded, tmp_path: Path, name: str) -> None:
    """`golden.json` has the digests of the other files."""
    write_recording(tmp_path, recorded.recording)
    (tmp_path / name).write_bytes(b"another")
    with pytest.raises(OutputError, match=r"is not the file that golden\.json was written with"):
        read_recording(tmp_path, command=COMMAND)
    (tmp_path / name).unlink()
    with pytest.raises(OutputError, match=f"lacks {name}"):
        read_recording(tmp_path, command=COMMAND)


def test_garbage_is_one_sentence(recorded: Recorded, tmp_path: Path) -> None:
    """Not a traceback."""
    write_recording(tmp_path, recorded.recording)
    (tmp_path / GOLDEN).write_text("[", encoding="utf-8")
    with pytest.raises(OutputError, match="is not JSON that specverify wrote"):
        read_recording(tmp_path, command=COMMAND)
