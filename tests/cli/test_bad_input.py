"""Whatever a user gets wrong ends in one sentence that says what to do, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.pairs import embedded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Outcome, Run

PAIR = embedded()


def refused(outcome: Outcome, said: str, folder: Path) -> None:
    """One line on standard error, no traceback, and no certificate or half of one."""
    assert outcome.code == 2, outcome
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("specverify: error: ")
    assert said in outcome.err
    assert outcome.out == ""
    assert not [path for path in folder.rglob("*") if path.name in {"certificate.json", "crash.txt"}]
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["certify", "./nowhere", str(PAIR.draft)], "'./nowhere' does not exist"),
        (["certify", "", str(PAIR.draft)], "name is empty"),
        (["certify", str(PAIR.target)], "needs a DRAFT"),
        (["certify", "--pair", "embedded", str(PAIR.target), str(PAIR.draft)], "not both"),
        (["certify", "--pair", "embeded"], "did you mean embedded?"),
        (["certify", str(PAIR.target), str(PAIR.draft), "--drafter", "prompt-lookup"], "leave DRAFT out"),
        (["certify", "a", "b", "c"], "unexpected extra argument"),
        (["certify", "--drafter", "ngram"], "there is no drafter named 'ngram'"),
        (["certify", "--rule", "chian"], "did you mean 'chain'?"),
        (["certify", "--fault", "always-acept"], "did you mean always-accept?"),
        (["certify", "--only", "compatability"], "did you mean compatibility?"),
        (["certify", "--budget", "huge"], "there is no budget named 'huge'"),
        (["certify", "--num-speculative-tokens", "0"], "num_speculative_tokens"),
        (["certify", "--seed", "-1"], "seed"),
        (["certify", "--seed", "x"], "see `specverify certify --help`"),
        (["certify", "--device", "gpu"], "device 'gpu' is unknown"),
        (["certify", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["certify", "--plan", "nowhere.toml"], "nowhere.toml"),
        (["certify", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["certify", "--frobnicate"], "--frobnicate"),
        (["certfy"], "certfy"),
        ([str(PAIR.target), str(PAIR.draft)], "see `specverify --help`"),
    ],
)
def test_mistaken_arguments(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    """Typing errors, options that don't go together, values that can't be."""
    refused(run(*arguments, "--quiet"), said, tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "holds no prompt"),
        ('{"text": ""}', "empty"),
        ("Hello", "is not JSON"),
        ('{"prompt": "Hello"}', "unknown key 'prompt'"),
        ('{"id": "long", "text": "' + "word " * 2000 + '"}', "prompt 'long' has"),
    ],
)
def test_mistaken_prompts(run: Run, tmp_path: Path, lines: str, said: str) -> None:
    """The line or the prompt is named."""
    (tmp_path / "mine.jsonl").write_text(lines)
    refused(run("certify", "--prompts", "mine.jsonl", "--quiet"), said, tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("seed = ", "is not TOML"),
        ("sead = 3", "unknown key 'sead'"),
        ("seed = 'three'", "not an integer"),
        ("max_new_tokens = 100000", "positions"),
    ],
)
def test_mistaken_plan(run: Run, tmp_path: Path, table: str, said: str) -> None:
    """The key is named."""
    (tmp_path / "mine.toml").write_text(table)
    refused(run("certify", "--plan", "mine.toml", "--quiet"), said, tmp_path)


def test_budget_in_plan_and_command(run: Run, tmp_path: Path) -> None:
    """Which of them counts can't be guessed."""
    (tmp_path / "mine.toml").write_text("budget = 'deep'")
    refused(run("certify", "--plan", "mine.toml", "--budget", "quick", "--quiet"), "drop one", tmp_path)


def test_output_that_cannot_be_written_is_refused_before_the_run(run: Run, tmp_path: Path) -> None:
    """A file stands where the folder should be; no model is loaded first."""
    (tmp_path / "taken").write_text("mine")
    refused(run("certify", "./nowhere", "./nowhere", "--out", "taken/here", "--quiet"), "can't write", tmp_path)
    refused(run("certify", "./nowhere", "./nowhere", "--out", "taken", "--quiet"), "taken is a file", tmp_path)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out: (out / "certificate.json").mkdir(parents=True), "certificate.json is no file"),
        (lambda out: (out / "report.html").mkdir(parents=True), "report.html is no file"),
        (lambda out: (out.mkdir(), os.mkfifo(out / "certificate.json")), "certificate.json is no file"),
        (lambda out: (out.mkdir(), (out / "junit.xml").write_text("<pytest/>")), "junit.xml is not of a run of specverify"),
        (lambda out: (out.mkdir(), (out / "certificate.json").write_text("{}")), "certificate.json is not of a run of specverify"),
        (lambda out: (out / ".lock").mkdir(parents=True), "can't hold o for this run: is a directory"),
        (lambda out: out.symlink_to(PAIR.target), "is a model's folder"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_seen_before_the_run(
    run: Run, tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    """Nothing of somebody else's is written over, and no run ends without a place for its certificate."""
    make(tmp_path / "o")
    before = sorted(tmp_path.rglob("*"))
    outcome = run("certify", PAIR.target, PAIR.draft, "--out", "o", "--only", "compatibility", "--quiet")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert said in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


def test_no_command_puts_its_certificate_into_a_model(run: Run, copied: Callable[[str], Path]) -> None:
    """`qualify` of a pair of one's own, as `certify` above."""
    target = copied("target")
    before = sorted(target.iterdir())
    outcome = run("qualify", "fake", "--target", target, "--draft", PAIR.draft, "--out", target, "--quiet")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "is a model's folder" in outcome.err
    assert sorted(target.iterdir()) == before


def test_a_refused_run_takes_every_folder_away_that_it_made(run: Run, tmp_path: Path) -> None:
    """Those above the one of the run, too; a name that no file system takes is refused like any other."""
    for arguments in (["qualify", "/"], ["certify", "./nowhere", str(PAIR.draft)], ["qualify", "a" * 300]):
        assert run(*arguments, "--quiet").code == 2
        assert not list(tmp_path.iterdir()), arguments


def test_swapped_models(run: Run, tmp_path: Path) -> None:
    """A draft larger than its target is a mistake."""
    refused(run("certify", PAIR.draft, PAIR.target, "--quiet"), "larger than the target", tmp_path)


def test_unlike_vocabularies(run: Run, tmp_path: Path, copied: Callable[[str], Path]) -> None:
    """Most ids are another token to the draft; the first is named with both tokens."""
    draft = copied("draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    ordinary = [token for token, number in vocabulary.items() if number not in special]
    numbers = [vocabulary[token] for token in ordinary]
    vocabulary.update(zip(ordinary, [*numbers[1:], numbers[0]], strict=True))
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(run("certify", PAIR.target, draft, "--quiet"), "the vocabularies are unlike", tmp_path)


def test_few_differing_ids_are_for_the_check_to_judge(run: Run, copied: Callable[[str], Path]) -> None:
    """FAIL with the ids named, not a usage error."""
    draft = copied("draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    vocabulary[names[500]], vocabulary[names[501]] = 501, 500
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    outcome = run("certify", PAIR.target, draft, "--only", "compatibility")
    assert outcome.code == 1
    assert "id 500" in outcome.out


def test_truncated_weights(run: Run, tmp_path: Path, copied: Callable[[str], Path]) -> None:
    """As an interrupted download leaves them."""
    weights = copied("target") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(run("certify", weights.parent, PAIR.draft, "--quiet"), "truncated or corrupt", tmp_path)


def test_nan_logits(run: Run, tmp_path: Path, copied: Callable[[str], Path]) -> None:
    """Shown by the first check that asks the model; where the NaN was seen is said."""
    weights = copied("target") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    arguments = ("certify", weights.parent, PAIR.draft, "--only", "greedy", "--budget", "quick", "--quiet")
    refused(run(*arguments), "returned NaN", tmp_path)


@pytest.mark.parametrize("arguments", [["certify", "--fault", "no"], ["certify", "--frobnicate"], ["certfy"]])
def test_json_errors_are_one_object(run: Run, arguments: list[str]) -> None:
    """A script finds the sentence on standard output too."""
    outcome = run(*arguments, "--json")
    assert outcome.code == outcome.json["exit_code"] == 2
    assert outcome.json["error"]
    assert not outcome.json["error"].startswith("error:")
    assert outcome.json["error"] in outcome.err
