"""The option that points the conformance suite at somebody else's verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OURS = ("chain", "match")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--specverify-rule module:function`, as `specverify qualify --rule`."""
    group = parser.getgroup("specverify")
    group.addoption("--specverify-rule", metavar="MODULE:FUNCTION", help="the verifier to hold the claims on")
    group.addoption("--specverify-shape", metavar="NAME", help="how it is called, where its parameters don't say")
    group.addoption("--specverify-seed", metavar="S", type=int, default=0, help="of the examples")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every claim is held on the rule that was given, or on our own lossless ones."""
    if "qualified_rule" in metafunc.fixturenames:
        given = metafunc.config.getoption("--specverify-rule")
        metafunc.parametrize("qualified_rule", [given] if given else OURS)
