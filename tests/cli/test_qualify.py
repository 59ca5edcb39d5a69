"""`specverify qualify`: what it prints, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import specverify.qualify
from specverify.qualify.claims import CLAIMS

if TYPE_CHECKING:
    from tests.cli.conftest import Run

WRONG = "tests.unit.qualify.verifiers:residual_from_wrong_row"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first claims only, which cost least."""
    monkeypatch.setattr(specverify.qualify, "CLAIMS", CLAIMS[:4])


def test_a_wrong_rule_fails_with_one_readable_failure(run: Run, few: None) -> None:
    """Claim, effect, smallest example, advice, and the command that shows it again."""
    outcome = run("qualify", "--rule", WRONG)
    assert outcome.code == 1
    assert outcome.out.count("residual FAIL: it replaces rejected drafts by another law") == 1
    for part in ("smallest example: 2 ids, 1 draft", "looks like", "expected", "what to do", "✗ FAIL"):
        assert part in outcome.out
    assert f"Reproduce: specverify qualify --rule {WRONG} --seed 0" in outcome.out


def test_json_is_one_object(run: Run, few: None) -> None:
    """With the example's laws as fractions."""
    outcome = run("qualify", "--rule", WRONG, "--json")
    assert outcome.code == 1
    found = outcome.json
    assert (found["verdict"], found["blamed"], found["shape"], found["method"]) == (
        "FAIL",
        "residual",
        "plain",
        "exact",
    )
    example = next(claim["example"] for claim in found["claims"] if claim["id"] == "residual")
    assert example["vocab_size"] == 2
    assert all("/" in share or share in "01" for row in example["target"].values() for share in row)
    assert example["looks_like"] == ["it takes p from the row after the rejected token"]
    assert {row["outcome"] for row in example["table"]} == {"id 0 after a rejection", "id 1 after a rejection"}


def test_quiet_is_one_line(run: Run, few: None) -> None:
    """The verdict and the headline."""
    outcome = run("qualify", "--rule", "tests.unit.qualify.verifiers:plain", "--quiet")
    assert outcome.code == 0
    assert outcome.out == (
        "PASS  tests.unit.qualify.verifiers:plain: 4 of 4 claims were looked at, and none fails (exact)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rule", "chian"], "'chian' names no function; write module:function, or one of chain, match, greedy"),
        (["--rule", "nowhere:f"], "the module nowhere can't be imported"),
        (["--rule", "json:dumps"], "is none of the known call shapes"),
        (["--rule", WRONG, "--shape", "vlm"], "there is no shape named 'vlm'; known: specverify"),
        ([], "name an engine, such as transformers, or a verification function with --rule"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, arguments: list[str], said: str) -> None:
    """And exit code 2, without a traceback."""
    outcome = run("qualify", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("\n") == 1
