"""The gate: evidence judged again, files held against their digests, policies kept. Each refusal is shown to happen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from specverify.certify import CHECKS, ON_REQUEST
from specverify.gate import Reason, about_an_engine, differing_files, disagreements, unmet
from specverify.judge import headline
from specverify.plan import CHECK_IDS, ON_REQUEST_IDS, Plan
from specverify.policy import DomainPolicy, Policy
from specverify.records import Certificate, Finding, Verdict
from tests.unit.certificates import certificate_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD = certificate_of()
ALL = [result_of(name) for name in CHECK_IDS]


def changed(name: str, **changes: object) -> Certificate:
    """The good certificate with one check edited, everything else as it was."""
    return replace(GOOD, checks=tuple(replace(c, **changes) if c.id == name else c for c in GOOD.checks))


def with_test(name: str, **changes: object) -> Certificate:
    """The same for the first test of a check."""
    first, *others = next(check for check in GOOD.checks if check.id == name).tests
    return changed(name, tests=(replace(first, **changes), *others))


def test_the_list_of_checks_is_the_one_that_runs() -> None:
    """The gate knows the names without importing the checks."""
    assert tuple(check.id for check in CHECKS) == CHECK_IDS
    assert tuple(check.id for check in ON_REQUEST) == ON_REQUEST_IDS


def test_a_deep_run_has_the_checks_on_request_too() -> None:
    """Without them it lacks some, and a standard run with them has too many."""
    deep, more = Plan(budget="deep"), [result_of(name) for name in (*CHECK_IDS, *ON_REQUEST_IDS)]
    assert not list(disagreements(certificate_of(*more, plan=deep)))
    assert list(disagreements(certificate_of(*ALL, plan=deep))) == ["the check two-arms is missing"]
    assert "two-arms was not asked for" in " ".join(disagreements(certificate_of(*more)))
    named = Plan(only=("two-arms",))
    assert not list(disagreements(certificate_of(more[-1], plan=named)))


def test_a_good_certificate_agrees_with_itself_and_is_let_out() -> None:
    """Nothing to say, without a policy and with one that it meets."""
    assert not list(disagreements(GOOD))
    assert not list(unmet(GOOD, Policy()))


def test_the_engine_under_test_may_be_another() -> None:
    """The headline names it, and is computed with it again."""
    made = certificate_of(engine="vllm", headline=headline(GOOD.checks, fault="", whole=True, engine="vllm"))
    assert made.headline != GOOD.headline
    assert not list(disagreements(made))
    assert not about_an_engine(made)
    assert about_an_engine(replace(made, checks=(result_of("cells/greedy"),)))


def test_a_failed_and_an_undecided_run_agree_with_themselves() -> None:
    """Honest bad news is refused for what it says, not as a forgery."""
    failing = result_of("lossless")
    failing = replace(failing, tests=tuple(replace(test, p_value=1e-12) for test in failing.tests[:1]))
    for made in (
        certificate_of(failing, plan=Plan(only=("lossless",))),
        certificate_of(*ALL[:-1], result_of("cost", Verdict.FAIL)),
    ):
        assert not list(disagreements(made))
        assert Reason.VERDICT in {each.reason for each in unmet(made, Policy())}


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        (lambda: replace(GOOD, verdict=Verdict.FAIL), "the verdict is FAIL"),
        (lambda: replace(GOOD, headline="All is well."), "headline"),
        (lambda: replace(GOOD, seed=3), "seed"),
        (lambda: replace(GOOD, plan={**GOOD.plan, "minimum_speedup": 0.1}), "plan_sha256"),
        (lambda: replace(GOOD, plan={**GOOD.plan, "false_fail_rate": 2.0}), "no false_fail_rate"),
        (lambda: replace(GOOD, checks=GOOD.checks[1:]), "compatibility is missing"),
        (lambda: replace(GOOD, checks=(*GOOD.checks, GOOD.checks[0])), "there twice"),
        (lambda: replace(GOOD, checks=(*GOOD.checks, result_of("vibes"))), "vibes was not asked for"),
        (lambda: replace(GOOD, error_budget=replace(GOOD.error_budget, num_p_values=1)), "error budget"),
        (lambda: with_test("lossless", p_value=1e-12), "'lossless p' failed when it is judged again"),
        (lambda: with_test("lossless", allowed=1e-30), "other allowances"),
        (lambda: with_test("lossless", failed=True), "'lossless p' holds when it is judged again"),
        (lambda: with_test("lossless", p_value=-1.0), "can't be judged again"),
        (lambda: changed("lossless", tests=()), "error budget"),
        (lambda: changed("lossless", smallest_detectable=0.5), "could not see a shift"),
        (lambda: changed("lossless", smallest_detectable=-1.0), "could not see a shift"),
        (lambda: changed("compatibility", num_samples=0), "PASS on 0 tokens"),
        (lambda: changed("exactness", measurements={"largest_tv": 0.5}), "larger TV distance"),
        (lambda: changed("cost", measurements={"measured_speedup_low": 0.9}), "reaches down to the plan's minimum of 1"),
        (lambda: changed("cost", measurements={"measured_speedup_low": 10**400}), "reaches down to the plan's minimum of 1"),
        (lambda: with_test("greedy", p_value=None, log10_e=float("nan")), "can't be judged again"),
        (lambda: certificate_of(*[replace(r, tests=()) for r in ALL]), "greedy is PASS without any test"),
        (lambda: certificate_of(plan=Plan(minimum_speedup=9.0)), "the plan's minimum of 9"),
        (lambda: certificate_of(result_of("acceptance", measurements={"expected_acceptance_high": 0.7}), plan=Plan(minimum_acceptance=0.9, only=("acceptance",))), "acceptance is PASS below"),
        (lambda: replace(GOOD, plan={k: v for k, v in GOOD.plan.items() if k != "only"}), "no only to judge by"),
        (lambda: replace(GOOD, plan={**GOOD.plan, "largest_undetected_shift": float("inf")}), "no largest_undetected_shift"),
        (lambda: changed("greedy", measurements={"num_wrong_tokens": 2}), "num_wrong_tokens = 2"),
        (lambda: changed("stopping", findings=(Finding(text="one too many"),)), "one too many"),
    ],
)  # fmt: skip
def test_tampering_is_named(forged: Callable[[], Certificate], said: str) -> None:
    """Each is a record with digests taken afresh: it is the evidence that contradicts it."""
    assert said in " | ".join(disagreements(forged()))


def test_a_failed_check_can_not_be_called_passed() -> None:
    """Its test fails again, whatever verdict was written over it."""
    failing = [replace(r, tests=tuple(replace(t, log10_e=9.0 if t.log10_e else None) for t in r.tests)) for r in ALL]
    honest = certificate_of(*failing)
    forged = replace(honest, verdict=Verdict.PASS, headline=GOOD.headline, checks=tuple(replace(c, verdict=Verdict.PASS) for c in honest.checks))  # fmt: skip
    assert honest.verdict is Verdict.FAIL
    assert "lossless is PASS, but its tests give FAIL" in list(disagreements(forged))


def test_every_changed_added_and_missing_file_is_named() -> None:
    """And a model that was not certified, or not from files."""
    served = {"target": GOOD.target.files, "draft": GOOD.draft.files}
    assert not list(differing_files(GOOD, served))
    files = dict(GOOD.target.files)
    files["config.json"] = "0" * 64
    files["extra.py"] = files.pop("tokenizer.json")
    said = list(differing_files(GOOD, {**served, "target": files}))
    assert [text.split(" (")[0] for text in said] == [
        "target: config.json was changed", "target: extra.py was added", "target: tokenizer.json is missing"
    ]  # fmt: skip
    assert "none was certified" in next(differing_files(replace(GOOD, draft=None), served))
    assert "give it too" in next(differing_files(GOOD, {"target": GOOD.target.files}))
    assert "in memory" in next(differing_files(replace(GOOD, target=replace(GOOD.target, files={})), served))


def test_target_and_draft_the_wrong_way_round_is_one_reason() -> None:
    """Not every file of both; a pair of one model with itself has no wrong way."""
    served = {"target": GOOD.draft.files, "draft": GOOD.target.files}
    assert list(differing_files(GOOD, served)) == [
        "TARGET and DRAFT are the wrong way round: each is what was certified as the other"
    ]
    alike = replace(GOOD, draft=GOOD.target)
    assert not list(differing_files(alike, {"target": GOOD.target.files, "draft": GOOD.target.files}))
    assert len(list(differing_files(GOOD, {**served, "draft": {**GOOD.target.files, "new.py": "0" * 64}}))) > 2


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(maximum_age_days=1), "2.0 days ago"),
        (Policy(versions={"transformers": ">=6"}), "transformers is 5.24.0"),
        (Policy(versions={"torch": "<2.12"}), "torch is 2.13.0+cpu"),
        (Policy(devices=("cuda",)), "the device is cpu"),
        (Policy(dtypes=("bfloat16",)), "float32"),
        (Policy(engines=("vllm",)), "engine"),
        (Policy(minimum_acceptance=0.69), "the lower end of acceptance is 0.68, 0.69 is wanted"),
        (Policy(minimum_speedup=1.2), "the lower end of the speed-up is 1.1"),
        (Policy(maximum_tolerated_flips=2), "3 near ties"),
        (Policy(maximum_false_fail_rate=1e-7), "error budget"),
        (Policy(largest_undetected_shift=0.01), "0.04"),
        (Policy(minimum_prompts=100), "64 prompts"),
        (Policy(minimum_samples={"lossless": 8000}), "7,000 samples"),
        (
            Policy(domains={"code": DomainPolicy(minimum_acceptance=0.65)}),
            "acceptance in the domain 'code' is 0.6, 0.65 is wanted",
        ),
        (
            Policy(domains={"law": DomainPolicy(minimum_acceptance=0.1)}),
            "acceptance in the domain 'law' is not known, for no prompt that was measured has it (there were: code), 0.1 is wanted",
        ),
    ],
)
def test_policy_is_kept(policy: Policy, said: str) -> None:
    """One key each, on a certificate that meets the others."""
    old = replace(GOOD, created=(datetime.now(UTC) - timedelta(days=2)).isoformat())
    refusals = list(unmet(old, policy))
    assert [each.reason for each in refusals] == [Reason.POLICY]
    assert said in refusals[0].text


def test_required_and_tolerated_checks() -> None:
    """NOT_RUN is no pass of a required check; INCONCLUSIVE is let through where the policy says so."""
    made = certificate_of(*ALL[:-2], result_of("acceptance", Verdict.NOT_RUN), result_of("cost", Verdict.INCONCLUSIVE))
    assert {each.reason for each in unmet(made, Policy())} == {Reason.VERDICT}
    assert not list(unmet(made, Policy(tolerated_inconclusive=("cost",))))
    wanted = Policy(tolerated_inconclusive=("cost",), required_checks=("acceptance",))
    assert "acceptance is required" in next(unmet(made, wanted)).text


def test_demonstrations_parts_remote_code_and_tomorrow() -> None:
    """None of them lets a pair out."""
    for made, said in (
        (replace(GOOD, fault="always-accept"), "planted"),
        (certificate_of(*[r for r in ALL if r.id in {"greedy", "lossless"}], plan=Plan(only=("greedy", "lossless"))), "--only"),
        (replace(GOOD, trust_remote_code=True), "allow_remote_code"),
        (replace(GOOD, created=(datetime.now(UTC) + timedelta(days=9)).isoformat()), "no time before now"),
        (replace(GOOD, created="yesterday"), "no time before now"),
    ):  # fmt: skip
        (refusal,) = unmet(made, Policy(maximum_age_days=30))
        assert said in refusal.text
        assert refusal.reason is (Reason.POLICY if "code" in said else Reason.VERDICT)


def test_the_gate_loads_neither_torch_nor_transformers() -> None:
    """It runs where models are served, and answers at once."""
    code = "import sys, specverify.gate, specverify.model_files, specverify.policy; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
