"""The Python door: what the README says of it, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specverify
from specverify.door import certify_pair, plan_of
from specverify.errors import OutputError, PlanError, PromptError, UsageError
from specverify.pairs import embedded
from specverify.records import FinishReason, Prompt, Verdict

ROOT = Path(__file__).parents[2]
PAIR = embedded()


def test_the_readmes_lines_run_as_they_stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the pair in the named folders, and one check instead of all."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## From Python") :]
    lines = re.findall(r"^    (.*)$", section[: section.index("\n## ", 5)], re.MULTILINE)
    assert len(lines) <= 5
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "target").symlink_to(PAIR.target)
    (tmp_path / "models" / "draft").symlink_to(PAIR.draft)
    monkeypatch.chdir(tmp_path)
    code = "\n".join(lines).replace('budget="quick"', 'budget="quick", only="compatibility"')
    assert "assert certificate.lets_out " in code
    names: dict[str, Any] = {}
    exec(code.replace("assert certificate.lets_out ", "certificate.lets_out "), names)
    assert names["certificate"].verdict is Verdict.PASS
    assert not names["certificate"].lets_out  # a part of the checks never does


def test_importing_specverify_brings_no_torch() -> None:
    """The name is there, what is behind it comes when it is called."""
    code = "import sys, specverify; print('certify_pair' in specverify.__all__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "False"]
    with pytest.raises(AttributeError, match="no attribute 'certifi'"):
        specverify.certifi  # noqa: B018 - asked for its error


def test_certificate_files_and_an_engine_of_ones_own(tmp_path: Path) -> None:
    """An engine that emits one id for ever is failed, and `out` holds what the command writes."""

    class Stuck:
        name, capabilities = "stuck", frozenset({"speculation_switch"})
        parameters = frozenset({"temperature"})

        def decode(self, requests):
            from specverify.records import DecodeTrace

            for request in requests:
                ids = (5,) * request.params.max_new_tokens
                yield DecodeTrace(request=request, sample=0, token_ids=ids, finish=FinishReason.LENGTH)

    made = certify_pair(
        prompts=["Once upon a time", "The sea"],
        engine=Stuck(),
        budget="quick",
        only=["greedy"],
        max_new_tokens=8,
        out=tmp_path / "o",
    )
    assert made.verdict is Verdict.FAIL
    assert (made.engine, made.num_prompts) == ("stuck", 2)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {
        "certificate.json",
        "report.html",
        "junit.xml",
        "summary.md",
    }


def test_mistakes_are_one_sentence() -> None:
    """Before a model is loaded."""
    for fields, said in (
        ({"sead": 1}, "did you mean 'seed'"),
        ({"only": "loseless"}, "lossless"),
        ({"seed": -1}, "seed"),
        ({"budget": "big"}, "budget"),
        ({"seed": "three"}, "seed to 'three', which is not an integer"),
        ({"only": 3}, "only to 3, which is not"),
        ({"params": {"top_k": 5}}, "params to {'top_k': 5}, which is not a table"),
        ({"minimum_speedup": None}, "minimum_speedup to None, which is not a number"),
        ({"lossless_tokens": 10**9}, "at most 100,000,000"),
        ({"largest_undetected_shift": 1e-9}, "largest_undetected_shift"),
    ):
        with pytest.raises(PlanError, match=said):
            certify_pair(**fields)
    for arguments, told in (
        ({"draft": "mine"}, "the draft mine has no target"),
        ({"engine": "transformers"}, "engine='transformers' is no engine"),
        ({"out": 3}, "out=3 is no folder"),
        ({"budget": 3}, "no budget named '3'"),
        ({"pair": 3}, "no embedded pair named '3'"),
        ({"trust_remote_code": "no"}, "trust_remote_code='no' is neither"),
    ):
        with pytest.raises(UsageError, match=told):
            certify_pair(**arguments)
    twice = Prompt(id="a", domain="b", text="c")
    for prompts, wrong in (
        ([], "there is no prompt"),
        (3, "prompts=3 is neither a file nor a list"),
        ("Once upon a time", "is no file; texts go into a list"),
        ([3], "prompt 1 is not a string"),
        (["Once", None], "prompt 2 is not a string"),
        ([""], "prompt 1 is empty"),
        (["x", "\ud800"], "prompt 2 holds half of a surrogate pair"),
        ([twice, twice], "prompt 2 has the id 'a'"),
    ):
        with pytest.raises(PromptError, match=wrong):
            certify_pair(prompts=prompts)
    assert plan_of(budget="deep", lossless_tokens=5).lossless_tokens == 5


def test_a_folder_that_cant_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """Not after it, when the certificate would be lost."""
    (tmp_path / "o").write_text("a file", encoding="utf-8")
    with pytest.raises(OutputError, match="is a file, and the certificate needs a folder"):
        certify_pair("nowhere", "nowhere", out=tmp_path / "o")
    (tmp_path / "models").symlink_to(PAIR.target)
    with pytest.raises(OutputError, match="is a model's folder"):
        certify_pair(PAIR.target, PAIR.draft, out=tmp_path / "models")
