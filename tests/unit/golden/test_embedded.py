"""The committed golden of the embedded pair holds here, and each upgrade of that pair is blamed on its layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specverify.golden.job import check
from specverify.golden_file import read_recording
from specverify.models.loading import load_pair
from specverify.pairs import embedded
from specverify.records import Verdict
from tests.unit.golden.conftest import now
from tests.unit.golden.test_upgrades import require_blamed
from tests.unit.golden.upgrades import UPGRADES, Upgrade

FOLDER = Path(__file__).parents[3] / "golden" / "embedded"


def test_the_committed_golden_holds() -> None:
    """It was recorded by the oldest transformers that is supported."""
    old = read_recording(FOLDER, command="")
    paths = embedded()
    report = check(load_pair(paths.target, paths.draft), old, provenance=now())
    assert report.verdict is Verdict.PASS, report.headline
    assert report.causes == ()


def test_the_committed_golden_is_small() -> None:
    """It lies in the repository."""
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


@pytest.mark.nightly
@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda each: each.name)
def test_an_upgrade_of_the_embedded_pair_is_blamed_on_its_layer(tmp_path: Path, upgrade: Upgrade) -> None:
    """As of the tiny pair, with weights that were trained."""
    paths = embedded()
    for role in ("target", "draft"):
        shutil.copytree(getattr(paths, role), tmp_path / role)
    upgrade.apply(tmp_path)
    old = read_recording(FOLDER, command="")
    report = check(load_pair(tmp_path / "target", tmp_path / "draft"), old, provenance=now())
    require_blamed(report, upgrade)
