"""A long measurement's file: what is there is gone on from, and what is another's is not overwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.calibrate import Counted
from specverify.cli.kept import measurement_key, read_kept, write_kept
from specverify.errors import OutputError
from specverify.kill_matrix import SMALL_PLAN, small_subject


def test_what_was_kept_is_read_again(tmp_path):
    """And nothing is read or written without a file."""
    path = tmp_path / "counts.json"
    nothing = Counted(key="this")
    assert read_kept(path, nothing) is nothing
    write_kept(path, replace(nothing, num_runs=7))
    assert read_kept(path, nothing).num_runs == 7
    write_kept(None, nothing)
    assert read_kept(None, nothing) is nothing


def test_another_measurement_is_not_overwritten(tmp_path):
    """Hours of it; nor is a file that is none of ours."""
    path = tmp_path / "counts.json"
    write_kept(path, Counted(key="that"))
    with pytest.raises(OutputError, match="another measurement"):
        read_kept(path, Counted(key="this"))
    path.write_text("[]")
    with pytest.raises(OutputError, match="not a Counted"):
        read_kept(path, Counted(key="this"))


def test_what_decides_a_measurement_is_in_its_key():
    """The plan's seed and the settings, but not how often it is done."""
    subject = small_subject()
    keys = {
        measurement_key(subject, plan, tokens=tokens)
        for plan in (SMALL_PLAN, replace(SMALL_PLAN, seed=SMALL_PLAN.seed + 1))
        for tokens in (100, 200)
    }
    assert len(keys) == 4
    assert measurement_key(small_subject(), SMALL_PLAN, tokens=100) in keys
