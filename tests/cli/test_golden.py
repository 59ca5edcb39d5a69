"""`specverify golden` and `specverify compare` on a tiny pair: what is written, what is refused, and how each ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.golden.upgrades import UPGRADES, copy_of, tiny_pair

if TYPE_CHECKING:
    from tests.cli.conftest import Run

TEXTS = {"a": "Elizabeth did not quite", "b": "def f(x):", "c": "Who are you?"}
PAIR = ("pair/target", "pair/draft", "--prompts", "prompts.jsonl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("golden") / "pair")


def write_prompts(*names: str, **changed: str) -> None:
    texts = TEXTS | changed
    lines = [json.dumps({"id": name, "text": texts[name], "domain": name}) for name in names]
    Path("prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_a_golden_is_recorded_held_extended_and_recorded_again(run: Run, pair: Path) -> None:
    """New prompts are added; what is recorded is only replaced with --update, and each time with a reason."""
    copy_of(pair, Path("pair"))
    write_prompts("a", "b")
    recorded = run("golden", "record", *PAIR, "--reason", "first", "--json")
    assert recorded.code == 0
    folder = Path(recorded.json["golden"])
    assert folder == Path("golden/target+draft")
    assert run("golden", "check", *PAIR, "--quiet").out.startswith("PASS  nothing changed")

    again = run("golden", "record", *PAIR, "--reason", "again")
    assert (again.code, again.err.count("\n")) == (2, again.err.count("specverify:"))
    assert "--update" in again.err

    write_prompts("a", "b", "c")
    missing = run("golden", "check", *PAIR)
    assert missing.code == 1
    assert "no golden yet for c; record: specverify golden record" in missing.out
    assert run("golden", "record", *PAIR, "--reason", "one more", "--json").json["recorded_prompts"] == 1
    held = run("golden", "check", *PAIR, "--json").json
    assert held["verdict"] == "PASS"
    assert [each["reason"] for each in held["recorded"]] == ["first", "one more"]

    write_prompts("a", "b")
    unused = run("golden", "check", *PAIR)
    assert unused.code == 1
    assert "unused: c is asked for no more; record again: specverify golden record" in unused.out
    assert unused.out.rstrip().endswith("--update")

    next(each for each in UPGRADES if each.name == "fine-tuned target").apply(Path("pair"))
    changed = run("golden", "check", *PAIR, "--json")
    assert changed.code == 1
    assert changed.json["causes"] == ["weights"]
    write_prompts("a", "b", "c")
    assert run("golden", "record", *PAIR, "--reason", "new weights", "--update").code == 0
    assert run("golden", "check", *PAIR).code == 0


def test_mistakes_are_one_sentence(run: Run, pair: Path) -> None:
    """Before anything is loaded."""
    copy_of(pair, Path("pair"))
    write_prompts("a", "b")
    for arguments, words in (
        (("golden", "check", *PAIR), "there is no golden in golden/target+draft; record one: specverify golden record"),
        (("golden", "record", *PAIR, "--reason", " "), "--reason is empty"),
        (("golden", "record", *PAIR), "Missing option '--reason'"),
        (("golden", "check", "pair/target"), "needs a DRAFT"),
        (("compare", "embedded"), "give OLD and NEW, or OLD and --metrics URL"),
        (("compare", "nowhere", "embedded"), "'nowhere' isn't there, and is no embedded pair"),
        (("compare", "pair", "prompts.jsonl"), "'prompts.jsonl' is no certificate, golden or pair"),
        (("compare", "embedded", "--metrics", "ftp://x", "--baseline", "0.5"), "is no address"),
        (
            ("compare", "embedded", "--metrics", "http://127.0.0.1:9/", "--interval", "0.1"),
            "is no certificate or golden",
        ),
    ):
        ended = run(*arguments)
        assert ended.code == 2
        assert words in ended.err


def test_pairs_and_goldens_are_compared(run: Run, pair: Path) -> None:
    """A pair against its golden over the recorded texts: the same draft falls by nothing, another one falls."""
    copy_of(pair, Path("pair"))
    write_prompts("a", "b", "c")
    assert run("golden", "record", *PAIR, "--reason", "first", "--name", "tiny").code == 0
    same = run("compare", "golden/tiny", "pair", "--prompts", "prompts.jsonl", "--json")
    assert same.code == 0
    assert abs(same.json["acceptance"]["difference"]["estimate"]) < 1e-4
    copy_of(pair, Path("other"))
    next(each for each in UPGRADES if each.name == "swapped draft").apply(Path("other"))
    fallen = run("compare", "pair", "other/target,other/draft", "--prompts", "prompts.jsonl", "--quiet")
    assert fallen.code == 1
    assert fallen.out.startswith("FAIL  acceptance fell")


def test_two_drafts_go_by_their_names(run: Run, pair: Path) -> None:
    """What is first, what is second, and of what the figures are."""
    copy_of(pair, Path("pair"))
    write_prompts("a", "b", "c")
    drafts = ("pair/draft", "./pair/draft")
    done = run("drafts", "pair/target", *drafts, "--prompts", "prompts.jsonl", "--tokens", "100")
    assert done.code == 3
    assert done.out.splitlines()[:4] == [
        "first:  pair/draft",
        "second: ./pair/draft",
        "",
        "tokens a step, with 95 % intervals",
    ]
    assert "difference +0.0000 [" in done.out
