"""`specverify certify` on the embedded pair: what it prints, leaves behind, and ends with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from specverify.cli.output import reserved
from specverify.codec import write_text_atomically
from specverify.errors import InternalError, OutputError, SubjectError
from specverify.records import Verdict
from specverify.statement import load_certificate, read_certificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import FakeChecks, Run

FILES = {"certificate.json", "report.html", "junit.xml", "summary.md"}


def names(folder: Path) -> set[str]:
    """Of the files in a folder, hidden ones included."""
    return {path.name for path in folder.iterdir()}


def test_embedded_pair_is_compatible(run: Run, tmp_path: Path) -> None:
    """The real check on the real pair; all four files, and nothing else, are left."""
    outcome = run("certify", "--only", "compatibility", "--budget", "quick")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "specverify-out" / "embedded-only-compatibility"  # a part never overwrites the whole
    assert names(folder) == FILES
    certificate = read_certificate(folder / "certificate.json")
    assert [check.id for check in certificate.checks] == ["compatibility"]
    assert certificate.plan["budget"] == "quick"
    assert certificate.command == "specverify certify --budget quick --only compatibility"
    assert "PASS" in outcome.out
    assert "specverify-out/embedded-only-compatibility/certificate.json" in outcome.out.replace("\n", "")
    assert outcome.err.splitlines() == ["specverify: loading …", "specverify: compatibility …"]
    ET.fromstring((folder / "junit.xml").read_text())


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((Verdict.PASS, Verdict.PASS), 0),
        ((Verdict.PASS, Verdict.FAIL), 1),
        ((Verdict.PASS, Verdict.INCONCLUSIVE), 3),
        ((Verdict.NOT_RUN, Verdict.NOT_RUN), 3),
    ],
)
def test_exit_code_is_the_verdicts(
    run: Run, fakes: Callable[..., FakeChecks], verdicts: tuple[Verdict, Verdict], code: int
) -> None:
    """0 pass, 1 fail, 3 inconclusive or nothing ran; the files are written whatever the verdict."""
    fakes(one=verdicts[0], two=verdicts[1])
    assert run("certify", "--out", "here").code == code


def test_json_is_the_certificate_and_nothing_else(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """Standard output parses as it is, and is the file byte for byte."""
    fakes(one=Verdict.PASS)
    outcome = run("certify", "--json", "--out", "here")
    assert load_certificate(outcome.out).verdict is Verdict.PASS
    assert outcome.out == (tmp_path / "here" / "certificate.json").read_text()


def test_quiet_is_one_line(run: Run, fakes: Callable[..., FakeChecks]) -> None:
    """The verdict, and nothing on standard error."""
    fakes(one=Verdict.FAIL)
    outcome = run("certify", "--quiet")
    assert outcome.out.startswith("FAIL  ")
    assert len(outcome.out.splitlines()) == 1
    assert outcome.err == ""


def test_options_change_the_plan_and_the_command(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """The plan file changes the budget's numbers, the options change the plan file's; both come back in the command."""
    fakes(one=Verdict.PASS)
    (tmp_path / "my plan.toml").write_text("num_speculative_tokens = 5\nseed = 3\nmax_new_tokens = 16\n")
    outcome = run("certify", "--plan", "my plan.toml", "--seed", "4", "--dtype", "float64", "--json")
    plan = outcome.record["plan"]
    assert (plan["num_speculative_tokens"], plan["seed"], plan["max_new_tokens"], plan["dtype"]) == (
        5,
        4,
        16,
        "float64",
    )
    assert outcome.record["command"] == "specverify certify --plan 'my plan.toml' --seed 4 --dtype float64"


def test_fault_has_a_folder_of_its_own(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """A demonstration never overwrites a real certificate, and says what it is."""
    fakes(one=Verdict.FAIL)
    outcome = run("certify", "--fault", "always-accept", "--json")
    assert outcome.record["fault"] == "always-accept"
    assert (tmp_path / "specverify-out" / "embedded-fault-always-accept" / "certificate.json").is_file()


def test_prompt_lookup_needs_no_draft(
    run: Run, fakes: Callable[..., FakeChecks], copied: Callable[[str], Path]
) -> None:
    """The target alone is loaded; the folder is named after what was given."""
    fakes(one=Verdict.PASS)
    outcome = run("certify", copied("target"), "--drafter", "prompt-lookup", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.record["draft"] is None


def test_folders_give_their_names(run: Run, fakes: Callable[..., FakeChecks], copied: Callable[[str], Path]) -> None:
    """`specverify-out/TARGET+DRAFT`."""
    fakes(one=Verdict.PASS)
    outcome = run("certify", copied("target"), copied("draft"))
    assert "specverify-out/my-target+my-draft/certificate.json" in outcome.out.replace("\n", "")


# ---------------------------------------------------------------------------------------------- interrupted, resumed


def test_interrupted_run_is_resumed(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """What was finished is not asked again; the checkpoint goes when the run is whole."""
    fakes(one=Verdict.PASS, two=Verdict.PASS, raises={"two": KeyboardInterrupt()})
    stopped = run("certify", "--out", "here")
    assert stopped.code == 130
    assert stopped.err.splitlines()[-1] == "specverify: interrupted; run the same command again to resume"
    assert names(tmp_path / "here") == {"checkpoint.json"}
    fake = fakes(one=Verdict.PASS, two=Verdict.PASS)
    resumed = run("certify", "--out", "here")
    assert resumed.code == 0
    assert fake.asked == ["two"]
    assert "one is not run again" in resumed.err
    assert names(tmp_path / "here") == FILES


def test_interrupted_json_is_one_object(run: Run, fakes: Callable[..., FakeChecks]) -> None:
    """Scripts read why it ended."""
    fakes(one=Verdict.PASS, raises={"one": KeyboardInterrupt()})
    assert run("certify", "--json").json["exit_code"] == 130


@pytest.mark.parametrize("options", [("--no-resume",), ("--seed", "4"), ("--fault", "always-accept")])
def test_other_run_is_not_resumed(run: Run, fakes: Callable[..., FakeChecks], options: tuple[str, ...]) -> None:
    """Neither with another plan, nor with another fault, nor when told not to."""
    fakes(one=Verdict.PASS, two=Verdict.PASS, raises={"two": KeyboardInterrupt()})
    run("certify", "--out", "here")
    fake = fakes(one=Verdict.PASS, two=Verdict.PASS)
    outcome = run("certify", "--out", "here", *options)
    assert fake.asked == ["one", "two"]
    assert ("begins anew" in outcome.err) == (options != ("--no-resume",))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', "\x00"])
def test_corrupt_checkpoint_is_ignored(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path, content: str
) -> None:
    """With a line that says so."""
    fakes(one=Verdict.PASS)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "checkpoint.json").write_text(content)
    outcome = run("certify", "--out", "here")
    assert outcome.code == 0
    assert "can't be read as a checkpoint" in outcome.err


# ---------------------------------------------------------------------------------------------- what goes wrong late


def test_full_disk_leaves_the_old_certificate_whole(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files or none: the third can't be written, so the first two are not put in place either."""
    fakes(one=Verdict.PASS)
    run("certify", "--out", "here")
    before = {name: (tmp_path / "here" / name).read_bytes() for name in FILES}

    def full(path: Path, text: str) -> None:
        if path.name == "summary.md":
            msg = f"can't write {path}: no space left on device"
            raise OutputError(msg)
        write_text_atomically(path, text)

    monkeypatch.setattr("specverify.cli.output.write_text_atomically", full)
    outcome = run("certify", "--out", "here", "--seed", "5")
    assert outcome.code == 2
    assert "no space left on device" in outcome.err
    assert names(tmp_path / "here") == {"previous", "checkpoint.json"}
    assert before == {name: (tmp_path / "here" / "previous" / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("error", [KeyError("x"), InternalError("x can't be")])
def test_bug_leaves_a_traceback_in_a_file_only(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path, error: Exception
) -> None:
    """One sentence asks for a report."""
    fakes(one=Verdict.PASS, raises={"one": error})
    outcome = run("certify", "--out", "here", "--quiet")
    assert outcome.code == 70
    assert len(outcome.err.splitlines()) == 1
    assert "please report it" in outcome.err
    assert "Traceback" not in outcome.err
    assert type(error).__name__ in (tmp_path / "here" / "crash.txt").read_text()


def test_broken_subject_is_a_finding(run: Run, fakes: Callable[..., FakeChecks]) -> None:
    """An engine that breaks while it is asked fails its check."""
    fakes(one=Verdict.PASS, raises={"one": SubjectError("it hung up")})
    outcome = run("certify", "--json")
    assert outcome.code == 1
    assert "it hung up" in json.dumps(outcome.record["checks"])


def test_full_memory_says_what_to_do(run: Run, fakes: Callable[..., FakeChecks]) -> None:
    """Not a bug, so exit code 2."""
    fakes(one=Verdict.PASS, raises={"one": MemoryError()})
    outcome = run("certify", "--quiet")
    assert outcome.code == 2
    assert "batch_size" in outcome.err


def test_a_run_that_is_refused_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    """Nothing was made, so nothing is left."""
    outcome = run("certify", str(tmp_path / "nowhere"), str(tmp_path / "either"), "--out", "here")
    assert outcome.code == 2
    assert not (tmp_path / "here").exists()


def test_two_runs_never_share_a_folder(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """The second is sent elsewhere, and the first isn't disturbed."""
    fakes(one=Verdict.PASS)
    with reserved(tmp_path / "here"):
        outcome = run("certify", "--out", "here")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == (
        "specverify: error: another run is writing to here; wait for it, or give this one another folder with --out"
    )
    assert run("certify", "--out", "here").code == 0
    assert names(tmp_path / "here") == FILES


@pytest.mark.parametrize(
    "arguments", [("--only", "no-such-check"), ("--only", "compatibility", "--prompts", "no-such-file.jsonl")]
)
def test_an_old_certificate_does_not_stand_beside_a_refused_run(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """It is set aside, is what the next run is compared with, and is gone after that."""
    folder = tmp_path / "out"
    good = ("certify", "--only", "compatibility", "--budget", "quick", "--out", str(folder))
    assert run(*good).code == 0
    assert run("certify", *arguments, "--out", str(folder)).code == 2
    assert names(folder) == {"previous"}
    assert names(folder / "previous") == FILES
    assert run(*good).code == 0
    assert names(folder) == FILES
    assert "from the certificate of" in (folder / "summary.md").read_text(encoding="utf-8")


def test_processes_that_nobody_asked_for_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several processes would write one certificate."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = run("certify", "--out", "here", "--quiet")
    assert outcome.code == 2
    assert "torchrun started 2 processes, and a certification is one; add --tensor-parallel" in outcome.err
    assert not (tmp_path / "here").exists()


def test_tensor_parallel_says_how_to_start_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun there is one process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    outcome = run("certify", "--tensor-parallel", "--quiet")
    assert outcome.code == 2
    assert "torchrun --nproc-per-node 2 -m specverify certify ... --tensor-parallel" in outcome.err


@pytest.mark.parametrize(
    "options", [("--ray", "local"), ("--device-map", "auto"), ("--engine", "transformers"), ("--matrix", "m.toml")]
)
def test_tensor_parallel_goes_with_no_other_layout(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    """Each in one sentence, before anything is loaded."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = run("certify", "--tensor-parallel", "--quiet", *options)
    assert outcome.code == 2
    assert f"so {options[0]} can't go with it" in outcome.err


def test_more_tests_than_were_reckoned_with_end_the_run_at_once(
    run: Run, fakes: Callable[..., FakeChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check that brought them, not after all."""

    def refuse(*_: object) -> None:
        msg = "too many"
        raise InternalError(msg)

    monkeypatch.setattr("specverify.certify.require_reckoned", refuse)
    asked = fakes(one=Verdict.PASS, two=Verdict.PASS).asked
    assert run("certify", "--quiet").code == 70
    assert asked == ["one"]
