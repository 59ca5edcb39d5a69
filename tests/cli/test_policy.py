"""`specverify certify --policy FILE`: what the gate will want is asked for, and held against the certificate at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specverify.checks.evidence import detectable_shift
from specverify.cli.invocation import Invocation
from specverify.errors import PlanError
from specverify.plan import BUDGETS, Plan
from specverify.policy import Policy
from specverify.policy_plan import asked_by, at_least, with_enough_tokens
from specverify.records import Verdict
from specverify.statement import read_certificate
from tests.cli.test_bad_input import refused
from tests.cli.test_matrix import written

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import FakeChecks, Run

PASSED = {"greedy": Verdict.PASS, "lossless": Verdict.PASS}


def policy(folder: Path, text: str) -> Path:
    """Written beside the run."""
    (folder / "p.toml").write_text(text)
    return Path("p.toml")


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        ({"minimum_acceptance": 0.6}, {"minimum_acceptance": 0.6}),
        ({"minimum_acceptance": 0.0, "minimum_speedup": 0.0}, {}),
        ({"minimum_speedup": 1.3}, {"minimum_speedup": 1.3}),
        ({"largest_undetected_shift": 0.03}, {"largest_undetected_shift": 0.03}),
        ({"largest_undetected_shift": 0.5}, {}),
        ({"maximum_false_fail_rate": 1e-9}, {"false_fail_rate": 1e-9}),
        ({"maximum_false_fail_rate": 0.1}, {}),
        ({"minimum_samples": {"lossless": 9_000, "greedy": 5}}, {"lossless_tokens": 9_000}),
        ({"minimum_samples": {"lossless": 9}}, {}),
        ({"minimum_prompts": 100}, {"max_prompts": 100}),
        ({"minimum_prompts": 3, "devices": ("cpu",), "versions": {"torch": ">2"}}, {}),
    ],
)
def test_each_field_makes_a_plan_no_laxer(wanted: dict[str, object], changed: dict[str, object]) -> None:
    """The table, a field at a time; what a policy leaves out, or sets to 0, changes nothing."""
    plan = at_least(Plan(), Policy(**wanted))  # type: ignore[arg-type]  # fields of any type
    assert {name: getattr(plan, name) for name in Plan.__dataclass_fields__} == {
        **{name: getattr(Plan(), name) for name in Plan.__dataclass_fields__},
        **changed,
    }


def test_a_policy_may_be_laxer_than_a_default_but_not_than_a_plan(tmp_path: Path) -> None:
    """A speed-up of 0.9 is enough where the policy says so, unless the plan's own file wants 1.5."""
    assert asked_by(Plan(), Policy(minimum_speedup=0.9)).minimum_speedup == 0.9
    (tmp_path / "p.toml").write_text("minimum_speedup = 0.9")
    (tmp_path / "plan.toml").write_text("minimum_speedup = 1.5")
    lax = Invocation(policy=tmp_path / "p.toml")
    assert lax.plan().minimum_speedup == 0.9
    assert Invocation(policy=lax.policy, plan_file=tmp_path / "plan.toml").plan().minimum_speedup == 1.5


def test_a_smaller_shift_or_budget_brings_the_tokens_that_it_takes(tmp_path: Path) -> None:
    """Or the run would end undecided; a shift that no run sees is refused."""
    (tmp_path / "p.toml").write_text("largest_undetected_shift = 0.03\nmaximum_false_fail_rate = 1e-8")
    plan = Invocation(policy=tmp_path / "p.toml", budget="quick").plan()
    assert plan.lossless_tokens > BUDGETS["quick"]["lossless_tokens"]
    assert detectable_shift(plan.lossless_tokens, plan) <= 0.03 == plan.largest_undetected_shift
    assert with_enough_tokens(plan) is plan
    (tmp_path / "p.toml").write_text("largest_undetected_shift = 1e-4")
    with pytest.raises(PlanError, match=r"p\.toml sets lossless_tokens to 1"):
        Invocation(policy=tmp_path / "p.toml").plan()


def test_a_policy_that_is_met(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """Exit 0, said in a line; the plan asked for enough, and the certificate's command has the policy in it."""
    fakes(**PASSED)
    wanted = policy(tmp_path, "devices = ['cpu']\nminimum_prompts = 4\nmaximum_false_fail_rate = 1e-7")
    outcome = run("certify", "--policy", wanted, "--out", "here")
    assert outcome.code == 0, outcome.err
    assert "policy p.toml: met" in outcome.out
    certificate = read_certificate(tmp_path / "here" / "certificate.json")
    assert certificate.plan["false_fail_rate"] == 1e-7
    assert "--policy p.toml" in certificate.command


def test_a_policy_that_is_not_met(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """Exit 1 beside a PASS, with what the gate will say; as JSON the reasons go to standard error."""
    fakes(**PASSED)
    wanted = policy(tmp_path, "minimum_speedup = 1.5\nmaximum_tolerated_flips = 1")
    outcome = run("certify", "--policy", wanted, "--out", "here")
    assert outcome.code == 1
    assert outcome.out.splitlines()[-3] == "policy p.toml: not met"
    assert "the lower end of the speed-up is not known, 1.5 is wanted" in outcome.out
    as_json = run("certify", "--policy", wanted, "--out", "here", "--json")
    assert (as_json.code, as_json.record["verdict"]) == (1, "PASS")
    assert "1.5 is wanted" in as_json.err
    gated = run("gate", "here/certificate.json", "--pair", "embedded", "--policy", wanted)
    assert "the lower end of the speed-up is not known, 1.5 is wanted" in gated.out


def test_undecided_is_for_the_policy_to_tolerate(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """Exit 0 where it does, 3 where it doesn't; a FAIL is never tolerated."""
    fakes(**PASSED, cost=Verdict.INCONCLUSIVE)
    assert run("certify", "--policy", policy(tmp_path, "tolerated_inconclusive = ['cost']"), "--quiet").code == 0
    assert run("certify", "--policy", policy(tmp_path, "minimum_prompts = 1"), "--quiet").code == 3
    fakes(**PASSED, cost=Verdict.FAIL)
    assert run("certify", "--policy", policy(tmp_path, "tolerated_inconclusive = ['cost']"), "--quiet").code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices = ['cuda: NVIDIA H200']", "can't meet p.toml: the device is cpu, allowed: cuda: NVIDIA H200"),
        ("dtypes = ['bfloat16']", "the dtype is float32, allowed: bfloat16"),
        ("engines = ['vllm']", "the engine under test is reference, allowed: vllm"),
        ("versions = { torch = '<2' }", "<2 is wanted"),
        ("minimum_prompts = 1000", "1000 are wanted"),
        ("required_checks = ['two-arms']", "two-arms is required and does not run; use --budget deep"),
        ("maximum_false_fail_rate = 0", "sets false_fail_rate to 0"),
        ("minimum_speed = 1.1", "unknown key 'minimum_speed'; did you mean 'minimum_speedup'?"),
    ],
)
def test_what_no_run_here_can_meet_is_refused_before_it(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path, text: str, said: str
) -> None:
    """Before a check is asked, not after hours."""
    asked = fakes(**PASSED).asked
    refused(run("certify", "--policy", policy(tmp_path, text), "--quiet"), said, tmp_path)
    assert not asked


def test_a_run_resumes_under_its_own_policy_alone(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """The same command goes on; without the policy it is another run."""
    wanted = policy(tmp_path, "minimum_prompts = 3")
    for arguments, again in ((("--policy", wanted), ["lossless"]), ((), ["greedy", "lossless"])):
        fakes(**PASSED, raises={"lossless": KeyboardInterrupt()})
        assert run("certify", "--policy", wanted, "--out", "here").code == 130
        asked = fakes(**PASSED).asked
        assert run("certify", *arguments, "--out", "here", "--quiet").code == 0
        assert asked == again


def test_a_policy_holds_for_every_cell_of_a_matrix(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """The cells' plans ask for enough, and each cell's reasons are in the table's file."""
    fakes(**PASSED)
    policy(tmp_path, "minimum_acceptance = 0.7\nminimum_samples = { lossless = 9_500 }")
    outcome = run("certify", "--matrix", written(tmp_path), "--policy", "p.toml", "--out", "here")
    assert outcome.code == 1, outcome.err
    assert outcome.out.count("the lower end of acceptance is not known, 0.7 is wanted") == 4
    cells = json.loads((tmp_path / "here" / "matrix.json").read_text())["cells"]
    assert all(len(cell["policy"]) == 2 for cell in cells)
    certificates = [read_certificate(each) for each in (tmp_path / "here").glob("*/certificate.json")]
    assert [each.plan["lossless_tokens"] for each in certificates] == [9_500] * 4
    policy(tmp_path, "minimum_prompts = 4")
    assert run("certify", "--matrix", "pairs.toml", "--policy", "p.toml", "--out", "here", "--quiet").code == 0
