"""Real processes of torchrun, transformers' own plan, gloo on the CPU: the certificate of one process, and what parts them is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specverify.pairs import embedded

pytest.importorskip("accelerate", reason="transformers loads by a tensor parallel plan with accelerate only")
pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).parents[2]
PLAN = """
budget = "quick"
greedy_prompts = 3
max_prompts = 12
max_new_tokens = 12
lossless_tokens = 300
parameter_tokens = 40
first_token_samples = 60
first_token_prompts = 2
batch_size = 4
"""
CHECKS = ("compatibility", "greedy", "stopping", "reproducibility", "parameters", "lossless", "acceptance")


def environment(**more: str) -> dict[str, str]:
    """This one, from the root of the checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def torchrun(folder: Path, fault: str, *arguments: str, number: int = 2, **more: str) -> tuple[str, float]:
    """What all processes print, and how long they took."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number),
        str(Path(__file__).with_name("certified.py")), fault, "certify", "--tensor-parallel", "--quiet", *arguments,
    ]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr, time.monotonic() - started


def said(printed: str) -> list[str]:
    """The sentences of specverify among torchrun's own lines."""
    return re.findall(r"^specverify: (.*)$", printed, flags=re.MULTILINE)


def certificate(folder: Path) -> Any:
    """The record in a folder."""
    statement = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    return statement["predicate"]["specverify"]["certificate"]


def verdicts(record: Any) -> list[tuple[str, str, str]]:
    """What a certificate says, but for `cost`, which a clock measures."""
    return [(check["id"], check["verdict"], check["summary"]) for check in record["checks"] if check["id"] != "cost"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one."""
    file = tmp_path_factory.mktemp("plan") / "plan.toml"
    file.write_text(PLAN, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, plan: Path) -> Any:
    """The certificate of one process."""
    folder = tmp_path_factory.mktemp("alone")
    only = [word for check in CHECKS for word in ("--only", check)]
    command = [sys.executable, "-m", "specverify", "certify", "--quiet", "--plan", str(plan), "--out", "out", *only]
    subprocess.run(command, cwd=folder, env=environment(), capture_output=True, timeout=300, check=False)
    return certificate(folder / "out")


def test_two_processes_give_the_certificate_of_one(tmp_path: Path, plan: Path, alone: Any) -> None:
    """Verdicts and summaries (tokens, rates, counts) are equal word for word; logits agree to rounding, so p-values may not."""
    only = [word for check in CHECKS for word in ("--only", check)]
    printed, _ = torchrun(tmp_path, "none", "--plan", str(plan), "--out", "out", *only)
    together = certificate(tmp_path / "out")
    assert verdicts(together) == verdicts(alone), printed
    assert together["environment"]["tensor_parallel"] == 2
    assert together["command"].startswith("torchrun --nproc-per-node 2 -m specverify certify --tensor-parallel")
    for role in ("target", "draft"):
        assert together[role] == alone[role]  # whole models, by their files
    assert not (tmp_path / "out" / "checkpoint.json").exists()
    assert printed.count("INCONCLUSIVE  ") + printed.count("PASS  ") == 1  # one process talks


def test_cost_is_measured_with_all_processes_in_each_pass(tmp_path: Path, plan: Path) -> None:
    """A clock of process 0 decides, so the others need none."""
    printed, _ = torchrun(tmp_path, "none", "--plan", str(plan), "--out", "out", "--only", "cost")
    (check,) = certificate(tmp_path / "out")["checks"]
    assert check["id"] == "cost", printed
    assert "measured speed-up" in check["summary"]


@pytest.mark.parametrize("fault", ["drop", "perturb", "kill", "hang"])
def test_a_process_that_goes_astray_ends_all_of_them_with_a_sentence(tmp_path: Path, plan: Path, fault: str) -> None:
    """Faults: one sum is left out, or is off in one process; one process is killed, or hangs. No certificate, and no waiting."""
    printed, took = torchrun(
        tmp_path, fault, "--plan", str(plan), "--out", "out", "--only", "greedy", SPECVERIFY_TEST_PASS_S="10"
    )
    assert took < 90, printed
    sentences = said(printed)
    parted = "agree on the same pass" if fault == "perturb" else "that hold the target"
    assert any(parted in each for each in sentences), printed
    assert not (tmp_path / "out" / "certificate.json").exists()
    assert "Traceback" not in "".join(line for line in printed.splitlines() if line.startswith("[rank"))


def test_what_has_no_plan_or_heads_that_don_t_divide_is_refused(tmp_path: Path) -> None:
    """Each in one sentence, said once."""
    pair = embedded()
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    sizes = {"vocab_size": 2048, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    gpt2 = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=2, **sizes)
    llama = AutoConfig.for_model(
        "llama", num_hidden_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=3, **sizes
    )
    for name, config in (("gpt2", gpt2), ("odd", llama)):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    found = {}
    for name in ("gpt2", "odd", "gone"):
        found[name] = said(torchrun(tmp_path, "none", f"./{name}", str(pair.draft))[0])
    found["plan"] = said(torchrun(tmp_path, "none", "--plan", "nowhere.toml")[0])
    assert [len(each) for each in found.values()] == [1, 1, 1, 1], found
    assert "transformers has no tensor parallel plan for ./gpt2" in found["gpt2"][0]
    assert "./odd has 3 attention heads, which 2 processes can't share evenly" in found["odd"][0]
    assert "does not exist" in found["gone"][0]
    assert "nowhere.toml" in found["plan"][0]
