"""The conformance suite on somebody else's verifier or engine: the options are those of specverify's pytest plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OURS = ("chain", "match")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every claim is held on the rule that was given, or on our own lossless ones."""
    if "qualified_rule" in metafunc.fixturenames:
        given = metafunc.config.getoption("--specverify-rule")
        metafunc.parametrize("qualified_rule", [given] if given else OURS)
