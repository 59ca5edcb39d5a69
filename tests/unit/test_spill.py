"""Evidence on disk: the same numbers, and memory that hardly grows with the tokens."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specverify.checks.acceptance import acceptance
from specverify.checks.lossless import lossless
from specverify.errors import OutputError
from specverify.plan import Plan
from specverify.scoring import ScoredTraces, score
from specverify.spill import Columns, Spill, Traces
from tests.unit.checks.hashed import subject

if TYPE_CHECKING:
    from specverify.checks.check import Check

SUBJECT = subject()
PLAN = Plan(lossless_tokens=1, max_new_tokens=32, batch_size=16)  # a small round is decoded soon, and counts as any
BYTES_A_TOKEN = 160


@lru_cache
def one_round() -> ScoredTraces:
    """A round of `lossless`, decoded and scored."""
    asked = list(lossless.rounds(SUBJECT, PLAN))[1]
    traces = list(SUBJECT.engine.decode(asked))
    return score(traces, target=SUBJECT.target, draft=SUBJECT.draft, stages=True)


def evidence(num_tokens: int) -> ScoredTraces:
    """So many tokens on disk: the round again and again, as other requests, for what a token takes doesn't depend on it."""
    once, spill = one_round(), Spill()
    scored = ScoredTraces()
    for number in range(-(-num_tokens // len(once))):
        anew = {
            each: replace(each, id=f"lossless/{number}/{each.prompt_id}") for each in dict.fromkeys(once.requests())
        }
        traces = tuple(replace(trace, request=anew[trace.request]) for trace in once.traces)
        scored = scored.merge(replace(once, traces=traces).on_disk(spill))
    return scored


def peak_bytes(check: Check, num_tokens: int) -> int:
    """The most that Python and numpy held while a check was gathered and concluded."""
    tracemalloc.start()
    try:
        scored = evidence(num_tokens)
        check.decided(replace(PLAN, lossless_tokens=num_tokens), scored)
        check.conclude(SUBJECT, replace(PLAN, lossless_tokens=num_tokens), scored)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("check", [lossless, acceptance], ids=lambda check: check.id)
def test_a_token_takes_few_bytes_of_memory(check: Check) -> None:
    """Beside its forty columns and its trace, which are a kilobyte."""
    one_round()
    few, many = 1_024, 5_120  # whole rounds
    grown = (peak_bytes(check, many) - peak_bytes(check, few)) / (many - few)
    assert grown < BYTES_A_TOKEN, f"{grown:.0f} bytes a token"


def test_what_is_on_disk_is_the_same() -> None:
    """Bit for bit, merged, cut and iterated."""
    once, spill = one_round(), Spill()
    whole = once.merge(once)
    kept = once.on_disk(spill).merge(once.on_disk(spill))
    assert isinstance(kept.columns, Columns)
    assert isinstance(kept.traces, Traces)
    mask = np.arange(len(whole)) % 3 > 0
    for there, here in ((kept, whole), (kept.where(mask).where(mask[mask]), whole.where(mask))):
        assert tuple(there.traces) == here.traces
        assert there.traces[-1] == here.traces[-1]
        assert there.requests() == here.requests()
        assert there.traces[1:3] == here.traces[1:3]
        assert len(there) == len(here)
        for name, values in {**here.columns, **here.fault_ratios}.items():
            read = {**there.columns, **there.fault_ratios}[name]
            np.testing.assert_array_equal(read, values)


def test_cut_evidence_is_merged_with_its_cut() -> None:
    """A mask stays with the rows that it was made for."""
    once, spill = one_round(), Spill()
    mask = np.arange(len(once)) % 2 == 0
    kept = once.on_disk(spill)
    np.testing.assert_array_equal(kept.where(mask).merge(kept)["token"], once.where(mask).merge(once)["token"])


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a traceback after hours."""
    spill = Spill(tmp_path)

    def full(_: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill, "_file", type("Full", (), {"seek": staticmethod(full)})())
    with pytest.raises(OutputError, match="can't keep the evidence on disk: no space left on device; free some space"):
        spill.put(np.zeros(3))


def test_a_full_disk_is_not_told_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What couldn't be written is tried once more when the file is closed, where nobody could catch it."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - the spill closes it
    monkeypatch.setattr("specverify.spill.tempfile.TemporaryFile", lambda **_: full)
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    spill = Spill()
    with pytest.raises(OutputError, match="no space left on device"):
        spill.put(np.zeros(3))
    del spill
    gc.collect()
    assert not told


def test_no_place_for_evidence_is_one_sentence(tmp_path: Path) -> None:
    """As the run begins; TMPDIR helps only where no folder was named."""
    with pytest.raises(
        OutputError, match="can't keep the evidence on disk: no such file or directory; check that disk"
    ):
        Spill(tmp_path / "gone")


@pytest.mark.parametrize(("named", "advice"), [(True, "free some space$"), (False, "free some space, or set TMPDIR")])
def test_the_advice_is_of_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool, advice: str) -> None:
    """The folder of a certificate is not where TMPDIR says."""

    def full(dir: Path | None) -> None:  # noqa: A002 - as `tempfile` names it
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specverify.spill.tempfile.TemporaryFile", full)
    with pytest.raises(OutputError, match=advice):
        Spill(tmp_path if named else None)


def test_what_does_not_come_back_is_one_sentence() -> None:
    """A disk that lost the end of the file."""
    spill = Spill()
    kept = spill.put(np.zeros(3))
    spill._file.truncate(10)
    with pytest.raises(OutputError, match="24 bytes were kept and 10 came back; check that disk"):
        kept.read()
