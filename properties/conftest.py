"""The conformance suite on somebody else's verifier or engine: the options are those of specverify's pytest plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
OURS = ("chain", "match")
HELD_ON = {"--specverify-rule": "qualified_rule", "--specverify-engine": "cell_id"}
"""Options, and what a test that is held on what they name has among its arguments."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every claim is held on the rule that was given, or on our own lossless ones."""
    if "qualified_rule" in metafunc.fixturenames:
        given = metafunc.config.getoption("--specverify-rule")
        metafunc.parametrize("qualified_rule", [given] if given else OURS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where somebody else's is given, nothing else of this folder is run: the other tests hold our own rules."""
    wanted = {argument for option, argument in HELD_ON.items() if config.getoption(option)}
    if not wanted:
        return
    others = [
        item
        for item in items
        if item.path.is_relative_to(HERE) and not wanted.intersection(getattr(item, "fixturenames", ()))
    ]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
