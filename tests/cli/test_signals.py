"""A run that a scheduler or a user ends: at once, resumable, and without a lock left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(folder: Path) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "specverify",
        "certify",
        "--only",
        "compatibility,exactness,lossless",
        "--budget",
        "deep",
        "--out",
        "here",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a shell's background job ignores SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no thread runs in this process
    )


def ended(run: subprocess.Popen[str], sent: signal.Signals) -> tuple[int, list[str], float]:
    """Exit code, lines, and seconds after the signal, which is sent when the longest check has begun."""
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line.strip())
        if "lossless …" in line:
            break
    time.sleep(1)  # into the decoding
    begun = time.monotonic()
    run.send_signal(sent)
    try:
        _, rest = run.communicate(timeout=60)
    finally:
        run.kill()  # one that didn't hear the signal must not outlive the test
    return run.returncode, lines + rest.splitlines(), time.monotonic() - begun


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_sigterm_then_ctrl_c_leave_a_state_to_resume_from(tmp_path: Path) -> None:
    """143 and 130, within seconds; finished checks are kept, and nothing else is left."""
    code, lines, seconds = ended(started(tmp_path), signal.SIGTERM)
    assert code == 143, lines
    assert lines[-1] == "specverify: interrupted; run the same command again to resume"
    assert seconds < 15  # a batch of this check alone takes longer on a busy machine
    assert {path.name for path in (tmp_path / "here").iterdir()} - {"rounds"} == {"checkpoint.json"}
    kept = json.loads((tmp_path / "here" / "checkpoint.json").read_text())
    assert [result["id"] for result in kept["results"]] == ["compatibility", "exactness"]
    code, lines, _ = ended(started(tmp_path), signal.SIGINT)
    assert code == 130, lines
    assert any("resumed from" in line and "compatibility, exactness are not run again" in line for line in lines)
    assert {path.name for path in (tmp_path / "here").iterdir()} - {"rounds"} == {"checkpoint.json"}
