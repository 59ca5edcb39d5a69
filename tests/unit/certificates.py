"""A certificate of the embedded pair as a run of all checks leaves it, made without running one."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from specverify.judge import headline, judge
from specverify.model_files import file_digests, model_files
from specverify.pairs import embedded
from specverify.plan import CHECK_IDS, Plan, plan_digest
from specverify.records import (
    Certificate,
    CheckResult,
    Environment,
    ModelFingerprint,
    StatisticalTest,
    Verdict,
    worst,
)

MEASURED: dict[str, dict[str, float | int | str]] = {
    "exactness": {"largest_tv": 1e-16},
    "greedy": {"num_wrong_tokens": 0, "num_tolerated_flips": 3},
    "boundary": {"num_mismatches": 0},
    "acceptance": {"expected_acceptance": 0.7, "expected_acceptance_low": 0.68, "expected_acceptance_in_code": 0.6},
    "cost": {"measured_speedup": 1.3, "measured_speedup_low": 1.1, "measured_speedup_high": 1.5},
}


def result_of(name: str, verdict: Verdict = Verdict.PASS, **changes: Any) -> CheckResult:
    """A check's result, with two tests where the check has statistics."""
    tests = ()
    if name in {"greedy", "lossless"}:
        usual = {"statistic": 0.0, "allowed": float("nan"), "failed": False, "num_samples": 900}
        tests = (
            StatisticalTest(name=f"{name} p", p_value=0.3, **usual),
            StatisticalTest(name=f"{name} e", log10_e=-0.5, **usual),
        )
    given = {
        "claim": f"{name} holds", "summary": f"{name} was seen", "measurements": MEASURED.get(name, {}), "tests": tests,
        "num_samples": 7_000, "smallest_detectable": {"exactness": 1e-12, "lossless": 0.04}.get(name),
    }  # fmt: skip
    return CheckResult(id=name, verdict=verdict, **(given | changes))


def fingerprint_of(role: str) -> ModelFingerprint:
    """The digests of an embedded model's files."""
    folder = getattr(embedded(), role)
    return ModelFingerprint(
        name=f"embedded {role}", architecture="LlamaForCausalLM", num_parameters=1, vocab_size=2048,
        weights_sha256="ab", tokenizer_sha256="cd", template_sha256="ef", config_sha256="01",
        files=file_digests(folder, model_files(folder)),
    )  # fmt: skip


def certificate_of(*results: CheckResult, plan: Plan | None = None, **changes: Any) -> Certificate:
    """What `certify` would have made of these results; of all checks, passed, where none are given."""
    plan = plan or Plan()
    judged, budget = judge(results or [result_of(name) for name in CHECK_IDS], plan.false_fail_rate)
    made = Certificate(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command="specverify certify",
        verdict=worst(result.verdict for result in judged),
        headline=headline(judged, fault="", whole=not plan.only),
        target=fingerprint_of("target"),
        draft=fingerprint_of("draft"),
        engine="reference",
        environment=Environment(
            specverify="0.1.0", python="3.11.7", torch="2.13.0+cpu", transformers="5.24.0", device="cpu",
            dtype="float32", num_threads=1, platform="x", cpu="y",
        ),
        plan=dataclasses.asdict(plan),
        plan_sha256=plan_digest(plan),
        seed=plan.seed,
        num_prompts=64,
        prompts_sha256="23",
        checks=judged,
        error_budget=budget,
        elapsed_s=1.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
