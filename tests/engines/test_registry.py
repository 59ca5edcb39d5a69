"""Engines by name: built-in ones, and whatever a user's module holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specverify.engines import Capability, EngineSettings
from specverify.engines.fake import FakeEngine
from specverify.engines.function import FunctionEngine
from specverify.engines.registry import ENGINES, find_engine, opened
from specverify.errors import PlanError, UsageError

SETTINGS = EngineSettings(target=Path())
OURS = "tests.engines.ten_lines"


def test_fake_opens_by_name():
    """Everything that a check may ask of an engine is there."""
    with opened("fake", SETTINGS) as engine:
        assert engine.capabilities == frozenset(Capability)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("decode", FunctionEngine), ("from_settings", FunctionEngine), ("engine", FakeEngine), ("context", FakeEngine)],
)
def test_users_callable_may_be_a_function_a_factory_or_a_context(name, kind):
    """Whichever it is, an engine comes out."""
    with opened(f"{OURS}:{name}", SETTINGS) as engine:
        assert isinstance(engine, kind)


def test_unknown_name_is_one_sentence_with_the_nearest():
    """And nothing is imported for it."""
    with pytest.raises(PlanError, match=r"no engine named 'transformer'; did you mean 'transformers'\?"):
        find_engine("transformer")


def test_what_is_no_engine_says_what_it_lacks():
    """One sentence with the shape that is wanted."""
    with (
        pytest.raises(PlanError, match=r"gave a int that is no engine .*prompt_ids, n, max_new_tokens, seed"),
        opened(f"{OURS}:number", SETTINGS),
    ):
        pass


def test_missing_extra_says_what_to_install(monkeypatch):
    """The package that is missing and the extra that brings it."""
    monkeypatch.setitem(ENGINES, "llamacpp", "no_such_package_here:opened")
    with pytest.raises(
        UsageError, match=r"llamacpp needs the package no_such_package_here.*specverify-decoding\[llamacpp\]"
    ):
        find_engine("llamacpp")


@pytest.mark.parametrize("name", ["mlx", "onnxruntime", "openvino"])
def test_missing_extra_of_an_engine_in_a_process_of_its_own_is_said_before_it_starts(monkeypatch, name):
    """By the same sentence."""
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=rf"{name} needs the package .*install specverify-decoding\[{name}\]"):
        find_engine(name)


def test_registry_imports_no_engine():
    """An engine's library is imported when that engine is asked for."""
    program = (
        "import sys, specverify.engines.registry as r; "
        "print([m for m in sys.modules if m.startswith('specverify.engines.') and m.rsplit('.')[-1] in r.ENGINES])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("option", ["colour"])
def test_fake_refuses_an_option_that_it_does_not_have(option):
    """A typing mistake is no default."""
    with (
        pytest.raises(PlanError, match="no option 'colour'"),
        opened("fake", EngineSettings(target=Path(), options=((option, "1"),))),
    ):
        pass
