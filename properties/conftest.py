"""The options that point the conformance suite at somebody else's verifier, or at a whole engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OURS = ("chain", "match")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--specverify-rule` and `--specverify-engine`, as `specverify qualify` takes them."""
    group = parser.getgroup("specverify")
    group.addoption("--specverify-rule", metavar="MODULE:FUNCTION", help="the verifier to hold the claims on")
    group.addoption("--specverify-shape", metavar="NAME", help="how it is called, where its parameters don't say")
    group.addoption("--specverify-engine", metavar="NAME", help="the engine: a built-in name or module:callable")
    group.addoption("--specverify-engine-option", metavar="K=V", action="append", default=[], help="a setting of it")
    group.addoption("--specverify-seed", metavar="S", type=int, default=0, help="of the examples")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every claim is held on the rule that was given, or on our own lossless ones."""
    if "qualified_rule" in metafunc.fixturenames:
        given = metafunc.config.getoption("--specverify-rule")
        metafunc.parametrize("qualified_rule", [given] if given else OURS)
