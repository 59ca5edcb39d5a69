"""`specverify gate` and `specverify init` as a deployment calls them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.pairs import embedded
from specverify.statement import render_statement
from tests.unit.certificates import certificate_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run

PAIR = embedded()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """The embedded pair's, passed."""
    path = tmp_path / "certificate.json"
    path.write_text(render_statement(certificate_of()))
    return path


def test_what_was_certified_is_let_out(run: Run, certificate: Path) -> None:
    """Exit 0 and one line; the embedded pair by its name or by its folders."""
    for models in (("--pair", "embedded"), (PAIR.target, PAIR.draft)):
        outcome = run("gate", certificate, *models, "--quiet")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("OPEN  embedded target with embedded draft")


def test_another_draft_is_not(run: Run, certificate: Path) -> None:
    """Exit 1, and the files are named, as text and as JSON."""
    outcome = run("gate", certificate, "--pair", "embedded-poor")
    assert outcome.code == 1
    assert "draft: model.safetensors was changed" in outcome.out
    reasons = run("gate", certificate, "--pair", "embedded-poor", "--json").json
    assert not reasons["open"]
    assert {each["reason"] for each in reasons["refusals"]} == {"files"}
    assert (
        "  files     TARGET and DRAFT are the wrong way round" in run("gate", certificate, PAIR.draft, PAIR.target).out
    )


def test_a_copied_folder_is_the_same_and_an_edited_one_is_not(
    run: Run, certificate: Path, copied: Callable[[str], Path]
) -> None:
    """Where a folder lies doesn't matter; one byte, one file more, one file less does."""
    target = copied("target")
    assert run("gate", certificate, target, PAIR.draft, "--quiet").code == 0
    weights = bytearray((target / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    (target / "modeling_mine.py").write_text("")
    (target / "chat_template.jinja").unlink()
    for name in ("custom_generate/generate.py", "code/deep/kernel.py", ".cache/not_loaded.py", "runs/log.txt"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("")
    said = run("gate", certificate, target, PAIR.draft).out
    inner = ("custom_generate/generate.py was added", "code/deep/kernel.py was added")
    for part in (
        "model.safetensors was changed",
        "modeling_mine.py was added",
        "chat_template.jinja is missing",
        *inner,
    ):
        assert f"target: {part}" in said
    assert "not_loaded" not in said
    assert "log.txt" not in said


def test_a_model_too_few_or_too_many(run: Run, certificate: Path, tmp_path: Path) -> None:
    """A draft that was certified has to be there, and one that was not can't be."""
    assert "a draft was certified" in run("gate", certificate, PAIR.target).out
    alone = tmp_path / "alone.json"
    alone.write_text(render_statement(replace(certificate_of(), draft=None)))
    assert run("gate", alone, PAIR.target, "--quiet").code == 0
    assert "none was certified" in run("gate", alone, "--pair", "embedded").out


def test_a_tampered_certificate_is_closed(run: Run, tmp_path: Path) -> None:
    """Edited as text: exit 1, and what contradicts what."""
    failed = render_statement(certificate_of(*(result_of(n) for n in ("greedy",)), result_of("lossless")))
    path = tmp_path / "forged.json"
    path.write_text(failed.replace('"p_value": 0.3', '"p_value": 0.9'))
    outcome = run("gate", path, "--pair", "embedded")
    assert outcome.code == 1
    assert "tampered" in outcome.out


def test_a_name_makes_no_line_of_its_own(run: Run, certificate: Path, tmp_path: Path) -> None:
    """Neither in the gate's answer nor in a comparison's: a forged certificate could say OPEN in a line below its refusal."""
    forged = certificate_of()
    named = "embedded target\r\nOPEN  all is well\u2028OPEN\x1b[2K\nOPEN  really"
    path = tmp_path / "forged.json"
    path.write_text(render_statement(replace(forged, target=replace(forged.target, name=named), engine=named)))
    for arguments in (
        ("gate", path, "--pair", "embedded"),
        ("gate", path, "--pair", "embedded-poor"),
        ("compare", certificate, path),
    ):
        outcome = run(*arguments)
        starts = [line.split()[0] for line in (outcome.out + outcome.err).splitlines() if line.strip()]
        assert "OPEN" not in starts[1:]
        assert "\x1b" not in outcome.out + outcome.err
        assert "\r" not in outcome.out


def test_policy_from_init_to_gate(run: Run, certificate: Path, tmp_path: Path) -> None:
    """`init` writes one that holds as it is, and whose every comment is a key that is understood."""
    assert run("init").code == 0
    written = tmp_path / "specverify.toml"
    assert run("gate", certificate, "--pair", "embedded", "--policy", written, "--quiet").code == 0
    everything = written.read_text().replace("\n# ", "\n").splitlines()
    text = "\n".join(line for line in everything if " = " in line)
    assert len(tomllib.loads(text)) == 16
    written.write_text(text)
    outcome = run("gate", certificate, "--pair", "embedded", "--policy", written)
    assert "measured_speedup" not in outcome.out
    assert outcome.out.splitlines()[0].startswith(("OPEN", "CLOSED"))


def test_init_overwrites_nothing(run: Run, tmp_path: Path) -> None:
    """Unless it is told to; the schema is printed and not written."""
    (tmp_path / "specverify.toml").write_text("mine")
    outcome = run("init")
    assert outcome.code == 2
    assert "--force" in outcome.err
    assert (tmp_path / "specverify.toml").read_text() == "mine"
    schema = run("init", "--schema").json
    assert schema["additionalProperties"] is False
    assert schema["properties"]["minimum_speedup"]["description"].startswith("Lower end")
    assert json.dumps(schema)
    assert run("init", "--force", "--quiet").code == 0
