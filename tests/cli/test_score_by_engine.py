"""`specverify certify --score-by engine` and `texts`: the target's weights are not read."""

from __future__ import annotations

import shutil

import pytest

from specverify.pairs import embedded

PLAN = "lossless_tokens = 600\nlargest_undetected_shift = 0.25\nmax_prompts = 4\nmax_new_tokens = 8\n"


@pytest.fixture
def pair(tmp_path):
    """The embedded pair; the folder that the command is given as the target holds no weights."""
    shipped = embedded()
    bare = tmp_path / "bare"
    shutil.copytree(shipped.target, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "plan.toml").write_text(PLAN)
    return bare, shipped.draft, tmp_path / "plan.toml"


@pytest.mark.parametrize(("kind", "code", "verdict"), [("sound", 0, "PASS"), ("sharp", 1, "FAIL")])
def test_an_engine_is_held_against_what_it_tells_itself(kind, code, verdict, pair, run, monkeypatch):
    target, draft, plan = pair
    monkeypatch.setattr("tests.engines.telling.TARGET", str(embedded().target))
    outcome = run(
        "certify", target, draft, "--engine", f"tests.engines.telling:{kind}", "--score-by", "engine", "--plan", plan,
        "--only", "lossless", "--json",
    )  # fmt: skip
    assert outcome.code == code, outcome.err
    checks = {check["id"]: check["verdict"] for check in outcome.record["checks"]}
    assert checks == {"off/lossless": "PASS", "lossless": verdict}
    assert "--score-by engine" in outcome.record["command"]
    assert outcome.record["target"]["weights_sha256"] == ""


@pytest.mark.parametrize(("kind", "code", "verdict"), [("sound", 0, "PASS"), ("sharp", 1, "FAIL")])
def test_an_engine_is_held_against_its_own_texts(kind, code, verdict, pair, run, monkeypatch):
    """Nothing but ids is asked of it."""
    target, draft, plan = pair
    monkeypatch.setattr("tests.engines.telling.TARGET", str(embedded().target))
    outcome = run(
        "certify", target, draft, "--engine", f"tests.engines.telling:{kind}", "--score-by", "texts", "--plan", plan,
        "--only", "lossless", "--json",
    )  # fmt: skip
    assert outcome.code == code, outcome.err
    (check,) = outcome.record["checks"]
    assert (check["id"], check["verdict"]) == ("lossless", verdict)
    assert check["effect_unit"] == "of the change that 0.7 of the temperature makes"
    assert outcome.record["target"]["weights_sha256"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--score-by", "engine"), "--score-by is for an engine, so say which"),
        (("--engine", "fake", "--score-by", "engin"), "no scorer named 'engin'; did you mean 'engine'?"),
        (
            ("--engine", "fake", "--score-by", "engine", "--only", "cost"),
            "no check with --score-by engine named 'cost'",
        ),
        (("--score-by", "texts"), "--score-by is for an engine, so say which"),
        (("--engine", "reference", "--score-by", "engine"), "tells no log-probabilities of a prompt"),
        (("--engine", "fake", "--score-by", "engine", "--ray", "auto"), "leave --ray out"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(options, said, run):
    outcome = run("certify", *options, "--budget", "quick")
    assert outcome.code == 2
    assert said in " ".join(outcome.err.split())
