"""Each upgrade made by hand is blamed on its own layer, alone and in pairs, and nothing is blamed without one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from specverify.golden.records import Change, Layer
from specverify.records import Verdict
from tests.unit.golden.upgrades import UPGRADES, Upgrade, copy_of

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.golden.records import GoldenReport
    from tests.unit.golden.conftest import Recorded

ORDER = list(Layer)
PAIRS = list(itertools.combinations(UPGRADES, 2))
QUICK_PAIRS = PAIRS[::17]


def names(upgrades: tuple[Upgrade, ...]) -> str:
    return " and ".join(each.name for each in upgrades)


def upgraded(recorded: Recorded, folder: Path, *upgrades: Upgrade) -> GoldenReport:
    """The report after these upgrades, retraining first: it writes whole files."""
    pair = copy_of(recorded.folder, folder / "pair")
    for upgrade in upgrades:
        upgrade.apply(pair)
    return recorded.check(pair)


def require_blamed(report: GoldenReport, *upgrades: Upgrade) -> None:
    """Exactly the upgrades' layers are causes, the first first, and each names its part; the rest is a consequence."""
    layers = sorted({each.layer for each in upgrades}, key=ORDER.index)
    assert list(report.causes) == layers
    assert report.verdict is Verdict.FAIL
    assert f"the {layers[0]} changed first" in report.headline
    quantised = any(each.name == "int8 target" for each in upgrades)
    for upgrade in upgrades:
        verdict = next(each for each in report.layers if each.layer is upgrade.layer)
        # rows that were rounded, too, are no longer the same rows in another order: the tensor is named, not the permutation
        assert (upgrade.part.removeprefix("rows of ") if quantised else upgrade.part) in verdict.parts
        assert verdict.findings
        assert verdict.advice


def test_the_same_files_change_nothing(recorded: Recorded, tmp_path: Path) -> None:
    """A copied folder, loaded anew, is the same pair."""
    report = recorded.check(copy_of(recorded.folder, tmp_path / "pair"))
    assert report.verdict is Verdict.PASS
    assert {each.change for each in report.layers} == {Change.UNCHANGED}


@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda each: each.name)
def test_an_upgrade_is_blamed_on_its_layer(recorded: Recorded, tmp_path: Path, upgrade: Upgrade) -> None:
    """And on no other one."""
    require_blamed(upgraded(recorded, tmp_path, upgrade), upgrade)


@pytest.mark.parametrize("upgrades", QUICK_PAIRS, ids=names)
def test_two_upgrades_are_both_blamed(recorded: Recorded, tmp_path: Path, upgrades: tuple[Upgrade, Upgrade]) -> None:
    """The one that acts first is named first."""
    require_blamed(upgraded(recorded, tmp_path, *upgrades), *upgrades)


@pytest.mark.nightly
@pytest.mark.parametrize("upgrades", [pair for pair in PAIRS if pair not in QUICK_PAIRS], ids=names)
def test_any_two_upgrades_are_both_blamed(
    recorded: Recorded, tmp_path: Path, upgrades: tuple[Upgrade, Upgrade]
) -> None:
    """All the other pairs."""
    require_blamed(upgraded(recorded, tmp_path, *upgrades), *upgrades)
