"""An interrupted check goes on at the round where it was, and its certificate is the one of a run that nobody interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from specverify.cluster import without_clock
from specverify.codec import dump
from specverify.engines.reference import ReferenceEngine
from specverify.statement import read_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Run

PLAN = """
max_prompts = 6
max_new_tokens = 12
lossless_tokens = 100
parameter_tokens = 24
first_token_samples = 40
first_token_prompts = 1
largest_undetected_shift = 0.9
"""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the decoder was asked, and at which call it is interrupted."""
    state = {"calls": 0, "interrupt_at": 0}
    original = ReferenceEngine.decode

    def decode(self: ReferenceEngine, requests: object) -> Iterator[object]:
        state["calls"] += 1
        if state["calls"] == state["interrupt_at"]:
            raise KeyboardInterrupt
        return original(self, requests)

    monkeypatch.setattr(ReferenceEngine, "decode", decode)
    return state


def certified(run: Run, folder: str) -> int:
    """The exit code of a small run."""
    return run("certify", "--only", "parameters,lossless", "--plan", "p.toml", "--out", folder, "--quiet").code


def test_a_check_resumes_at_its_round(run: Run, tmp_path: Path, decoded: dict[str, int]) -> None:
    """No round is decoded twice, nothing is left, and no bit differs."""
    (tmp_path / "p.toml").write_text(PLAN)
    whole = certified(run, "whole")
    total, decoded["calls"], decoded["interrupt_at"] = decoded["calls"], 0, 3
    assert total >= 3
    assert certified(run, "parts") == 130
    assert len(list((tmp_path / "parts" / "rounds").glob("*/*.npz"))) == 2
    decoded["calls"] = decoded["interrupt_at"] = 0
    assert certified(run, "parts") == whole
    assert decoded["calls"] == total - 2
    texts = [dump(without_clock(read_certificate(tmp_path / name / "certificate.json"))) for name in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


@pytest.mark.parametrize("spoiled", [b"", b"PK\x03\x04 not a zip", b"\x80\x04cos\nsystem\n(S'touch owned'\ntR."])
def test_a_spoiled_round_is_asked_again(run: Run, tmp_path: Path, decoded: dict[str, int], spoiled: bytes) -> None:
    """A file that was cut, or isn't ours, is never trusted and never run."""
    (tmp_path / "p.toml").write_text(PLAN)
    decoded["interrupt_at"] = 2
    assert certified(run, "parts") == 130
    (file,) = (tmp_path / "parts" / "rounds").glob("*/*.npz")
    file.write_bytes(spoiled)
    calls, decoded["interrupt_at"] = decoded["calls"], 0
    certified(run, "parts")
    assert decoded["calls"] > calls
    assert not list(tmp_path.rglob("owned"))


def test_rounds_of_another_run_are_thrown_away(run: Run, tmp_path: Path, decoded: dict[str, int]) -> None:
    """Another seed asks other rounds."""
    (tmp_path / "p.toml").write_text(PLAN)
    decoded["interrupt_at"] = 3
    assert certified(run, "parts") == 130
    (before,) = (tmp_path / "parts" / "rounds").iterdir()
    decoded["calls"] = 0
    (tmp_path / "p.toml").write_text(PLAN + "seed = 4\n")
    assert certified(run, "parts") == 130
    (after,) = (tmp_path / "parts" / "rounds").iterdir()
    assert before != after
