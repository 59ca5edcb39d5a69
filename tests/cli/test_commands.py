"""The small commands, and what the command line as a whole promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from specverify import __version__
from specverify.faults import FAULTS, Fault

if TYPE_CHECKING:
    from tests.cli.conftest import Run

HEAVY = ("torch", "transformers", "jinja2", "matplotlib", "numpy", "rich")


@pytest.mark.parametrize("arguments", [["--help"], ["certify", "--help"], ["version"], ["certify", "x"], ["certfy"]])
def test_nothing_heavy_is_imported_for_help_and_mistakes(arguments: list[str]) -> None:
    """So they answer at once."""
    program = (
        f"import sys; from specverify.cli import main; main({arguments!r}); "
        f"sys.exit(' '.join(set({HEAVY!r}) & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module() -> None:
    """`python -m specverify` ends with the exit code."""
    command = [sys.executable, "-m", "specverify", "certify", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("specverify: error: x needs a DRAFT")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110 - a device
@pytest.mark.parametrize(("arguments", "unbuffered"), [(["version", "--json"], "1"), (["--help"], "")])
def test_a_standard_output_that_is_full_is_no_bug(arguments: list[str], unbuffered: str) -> None:
    """One sentence and exit code 2, and no traceback in a file."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "specverify", *arguments]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "specverify: error: can't write to standard output: no space left on device; send it elsewhere, or free some space\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110 - a device
def test_a_standard_error_that_is_full_changes_no_exit_code() -> None:
    """Nobody reads it."""
    command = [sys.executable, "-m", "specverify", "certify", "x"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        assert subprocess.run(command, stderr=full, check=False).returncode == 2


def test_the_version_is_an_option_too(run: Run) -> None:
    """As of any tool."""
    assert (run("--version").code, run("--version").out) == (0, f"{__version__}\n")


def test_no_command_is_help(run: Run) -> None:
    """Not an error."""
    outcome = run()
    assert outcome.code == 0
    assert "certify" in outcome.out


def test_faults_are_listed(run: Run) -> None:
    """Name, what it stands for, and what catches it."""
    outcome = run("faults", "--list")
    assert outcome.code == 0
    assert all(fault.name in outcome.out for fault in FAULTS)
    assert run("faults", "--list", "--quiet").out.split() == [fault.name for fault in FAULTS]


def test_faults_are_listed_as_json(run: Run) -> None:
    """One object."""
    named = run("faults", "--list", "--json").json["faults"]
    assert [one["name"] for one in named] == [fault.name for fault in FAULTS]
    assert named[0]["caught_by"]


def test_faults_are_planted(run: Run) -> None:
    """A number where a check failed, a dot where it passed, and one sentence."""
    outcome = run("faults", "always-accept", "--only", "greedy,stopping")
    assert outcome.code == 0
    header, units, row, _, sentence = outcome.out.splitlines()
    assert header.split() == ["greedy", "stopping"]
    assert units.split() == ["tokens"]
    name, tokens, other = row.split()
    assert (name, int(tokens) > 0, other) == ("always-accept", True, "·")
    assert sentence == "1 of 1 faults caught by greedy, stopping"
    assert "faults …" in outcome.err


def test_kill_matrix_as_json(run: Run) -> None:
    """What each check said of each fault."""
    outcome = run("faults", "always-accept", "--only", "greedy", "--json")
    (row,) = outcome.json["faults"]
    assert row["checks"]["greedy"]["verdict"] == "FAIL"
    assert row["checks"]["greedy"]["num_samples"] > 0
    assert outcome.json["empty_rows"] == outcome.json["empty_columns"] == outcome.json["missed"] == []


def test_a_fault_that_gets_past_its_check_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and it is named."""
    monkeypatch.setattr(Fault, "plant", lambda _, subject: subject)
    outcome = run("faults", "always-accept", "--only", "greedy", "--quiet")
    assert outcome.code == 1
    assert outcome.out.startswith(
        "0 of 1 faults caught by greedy; by none of them: always-accept; MISSED: always-accept"
    )


def test_unknown_faults_and_checks_are_usage(run: Run) -> None:
    """With the nearest name, before anything is planted."""
    outcome = run("faults", "always-acept")
    assert (outcome.code, "did you mean always-accept?" in outcome.err) == (2, True)
    outcome = run("faults", "always-accept", "--only", "gredy")
    assert (outcome.code, "no check of correctness named 'gredy'" in outcome.err) == (2, True)


def test_faults_as_a_document(run: Run) -> None:
    """Two tables: what it stands for, and the matrix."""
    outcome = run("faults", "always-accept", "--only", "greedy", "--markdown")
    assert "| `always-accept` | every draft is accepted | exactness, greedy, lossless |" in outcome.out
    assert re.search(r"\| `always-accept` \| \d+ \|\n\n1 of 1 faults caught by greedy\.\n$", outcome.out)


def test_versions(run: Run) -> None:
    """What a certificate depends on."""
    assert run("version", "--json").json["specverify"] == __version__
    assert "transformers" in run("version").out
    assert run("version", "--quiet").out.strip() == __version__


def test_reader_that_goes_away_is_no_traceback() -> None:
    """`specverify version | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "specverify", "version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


def test_calibrate_counts_alarms_and_says_when_the_runs_are_too_few(run: Run) -> None:
    """One real run of a small stream on the embedded pair."""
    outcome = run("calibrate", "--runs", "1", "--tokens", "100", "--only", "lossless", "--json")
    assert outcome.code == 3, outcome.err
    assert outcome.json["verdict"] == "INCONCLUSIVE"
    assert outcome.json["num_failed"] == 0
    assert all(promise["num_runs"] >= 1 for promise in outcome.json["promises"])
