"""`specverify qualify ENGINE`: what it prints and writes, how it ends, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from specverify.cli.qualify_engine import EngineCommand

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


def certificate_in(outcome):
    """The certificate inside the statement that `--json` prints."""
    return outcome.json["predicate"]["specverify"]["certificate"]


CELLS = ("--only", "drafting,counters", "--budget", "quick")


def test_sound_engine_passes_and_leaves_a_certificate(run: Run, tmp_path: Path):
    """Terminal, JSON, Markdown, HTML and JUnit say the same."""
    outcome = run("qualify", "fake", *CELLS, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome
    assert "No difference from the target alone was found in fake" in " ".join(outcome.out.split())
    statement = json.loads((tmp_path / "out" / "certificate.json").read_text(encoding="utf-8"))
    certificate = statement["predicate"]["specverify"]["certificate"]
    assert certificate["verdict"] == "PASS"
    assert [one["id"] for one in certificate["checks"]] == ["off/again", "drafting", "counters"]
    assert ET.parse(tmp_path / "out" / "junit.xml").getroot().get("failures") == "0"
    assert "| counters |" in (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")


def test_planted_fault_ends_with_one_and_says_how_to_see_it_again(run: Run):
    """The command is one that can be pasted."""
    outcome = run("qualify", "fake", *CELLS, "--fault", "first-token-missed")
    assert outcome.code == 1
    command = "specverify qualify fake --fault first-token-missed --only counters --seed 17 --budget quick"
    assert f"Reproduce: {command}" in outcome.out
    assert run(*command.split()[1:], "--quiet").code == 1


def test_json_is_the_certificate_and_quiet_is_one_line(run: Run):
    """For scripts."""
    assert certificate_in(run("qualify", "fake", *CELLS, "--json"))["engine"] == "fake"
    quiet = run("qualify", "fake", *CELLS, "--quiet")
    assert quiet.out.startswith("PASS  No difference")
    assert quiet.out.count("\n") == 1
    assert quiet.err == ""


def test_users_function_is_undecided_without_a_word_on_its_drafts(run: Run):
    """It tells neither steps nor counters, so whether it drafts isn't known: never a PASS."""
    outcome = run("qualify", "tests.engines.ten_lines:decode", "--only", "drafting", "--budget", "quick", "--quiet")
    assert outcome.code == 3
    assert "Not decided" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fake", "--rule", "chain"], "give either the engine fake or --rule chain, not both"),
        ([], "name an engine"),
        (["transformrs"], "did you mean 'transformers'?"),
        (["no_such_module:engine"], "the module no_such_module can't be imported"),
        (["fake", "--draft", "x"], "give --target DIR with --draft DIR"),
        (["fake", "--target", "nowhere"], "nowhere is no folder"),
        (["fake", "--option", "seed"], "--option seed has no value"),
        (["fake", "--option", "color=red"], "no option 'color'"),
        (["fake", "--budget", "quik"], "no budget named 'quik'; did you mean quick?"),
        (["fake", "--only", "count"], "no cell named 'count'; did you mean counters?"),
        (["fake", "--fault", "seed-ignore"], "did you mean seed-ignored"),
        (["reference", "--fault", "seed-ignored"], "in the engine fake alone"),
        (["fake", "--num-speculative-tokens", "0"], "must be 1 to 64"),
        (["openai", "--url", "http://127.0.0.1:9"], "so say which: --target DIR"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, arguments, said):
    """Exit code 2, one line, no traceback, nothing written."""
    outcome = run("qualify", *arguments)
    assert outcome.code == 2, outcome
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


def test_a_pair_is_written_for_a_server_of_ones_own(run: Run, tmp_path: Path):
    """With the command that comes next."""
    outcome = run("qualify", "--write-pair", tmp_path / "pair")
    assert outcome.code == 0
    assert (tmp_path / "pair" / "target" / "model.safetensors").is_file()
    assert f"--target {tmp_path / 'pair' / 'target'} --draft" in outcome.out


def test_command_line_of_a_reproduction_keeps_every_option():
    """But for those that it sets itself."""
    command = EngineCommand(
        engine="vllm", url="http://127.0.0.1:8000", options=("logprobs=no",), max_length=512, seed=3
    )
    assert (
        command.words() == "specverify qualify vllm --url http://127.0.0.1:8000 --max-length 512 --option logprobs=no"
    )


def test_other_drafts_are_tried_with_a_pair_of_ours(run: Run):
    """The opposed draft, and one, eight and sixteen drafts a step."""
    outcome = run("qualify", "fake", "--only", "greedy", "--budget", "quick", "--json")
    ids = [check["id"] for check in certificate_in(outcome)["checks"]]
    assert ids[-4:] == ["greedy, opposed draft", "greedy, 1 drafts", "greedy, 8 drafts", "greedy, 16 drafts"]
