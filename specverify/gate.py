"""The gate: may these files be served on the strength of this certificate? Loads no model and imports no torch.

Note [What a gate can know]: the verdict is computed again from the evidence that the certificate records, so a changed
verdict, p-value, allowance, plan or list of checks contradicts the rest. Whoever forges all of it together, digests
included, makes a certificate that agrees with itself: that is what a signature is for (docs/gate.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specverify.errors import SpecverifyError
from specverify.judge import NEEDED, headline, judge
from specverify.plan import CHECK_IDS, ON_REQUEST_IDS, settings_digest
from specverify.records import Verdict, worst

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specverify.policy import Policy
    from specverify.records import Certificate, CheckResult, Environment, ModelFingerprint

__all__ = ["Reason", "Refusal", "about_an_engine", "differing_files", "disagreements", "foreseen", "unmet"]

_IN_DOMAIN = "expected_acceptance_in_"
_MUST_BE_ZERO = {
    "compatibility": "num_emittable_differing_ids",
    "boundary": "num_mismatches",
    "greedy": "num_wrong_tokens",
    "stopping": "num_wrong_endings",
}
"""A measurement of a check that can't have passed while it is not 0."""
_JUDGED_BY: dict[str, Callable[[object], bool]] = {
    "only": lambda value: isinstance(value, tuple),
    "budget": lambda value: isinstance(value, str),
    "false_fail_rate": lambda value: isinstance(value, float) and 0 < value < 1,
    "largest_undetected_shift": lambda value: isinstance(value, float) and 0 < value < 1,
    "minimum_speedup": lambda value: isinstance(value, (int, float)) and value >= 0,
    "minimum_acceptance": lambda value: isinstance(value, (int, float)) and value >= 0,
}
"""What of a plan is judged by here, and what it has to be."""


class Reason(StrEnum):
    """Why a pair is held back."""

    TAMPERED = "tampered"
    """The certificate contradicts itself."""
    FILES = "files"
    """What is about to be served is not what was certified."""
    VERDICT = "verdict"
    """The certificate lets no pair out, whatever the policy."""
    POLICY = "policy"
    """It does, but not to this policy."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One reason, in one sentence."""

    reason: Reason
    text: str


# ---------------------------------------------------------------------------------------------- the evidence again


def disagreements(certificate: Certificate) -> Iterator[str]:
    """Where a certificate's evidence, judged again, doesn't give what the certificate says."""
    plan: Mapping[str, Any] = certificate.plan
    results = certificate.checks
    if settings_digest(plan) != certificate.plan_sha256:
        yield "the plan is not the one that plan_sha256 was taken of"
    if plan.get("seed") != certificate.seed:
        yield f"the seed is {certificate.seed}, the plan's {plan.get('seed')}"
    if lacking := [name for name, holds in _JUDGED_BY.items() if not holds(plan.get(name))]:
        yield f"the plan has no {lacking[0]} to judge by"
        return
    yield from _wrong_list(certificate)
    try:
        judged, budget = judge(results, plan["false_fail_rate"])
    except (SpecverifyError, ValueError) as error:
        yield f"the tests can't be judged again: {error}"
        return
    if budget != certificate.error_budget:
        yield "the error budget is not the one of these tests"
    for result, again in zip(results, judged, strict=True):
        yield from _judged_otherwise(result, again)
        yield from _impossible_pass(result, plan)
    verdict = worst(result.verdict for result in judged)
    if verdict is not certificate.verdict:
        yield f"the verdict is {certificate.verdict}, but the checks give {verdict}"
    if _headline(certificate, judged) != certificate.headline:
        yield "the headline is not the one of these checks"


def about_an_engine(certificate: Certificate) -> bool:
    """Whether it is of `specverify qualify`: about an engine and its calibration pair, which nobody serves."""
    known = {*CHECK_IDS, *ON_REQUEST_IDS}
    return certificate.command.startswith("specverify qualify") or (
        bool(certificate.checks) and not any(result.id in known for result in certificate.checks)
    )


def _headline(certificate: Certificate, judged: Sequence[CheckResult]) -> str:
    whole = not certificate.plan.get("only")
    return headline(judged, fault=certificate.fault, whole=whole, engine=certificate.engine)


def _wrong_list(certificate: Certificate) -> Iterator[str]:
    plan: Mapping[str, Any] = certificate.plan
    usual = CHECK_IDS + (ON_REQUEST_IDS if plan["budget"] == "deep" else ())
    named = plan["only"] or usual
    asked = [name for name in CHECK_IDS + ON_REQUEST_IDS if name in named]
    listed = [result.id for result in certificate.checks]
    for name in asked:
        if name not in listed:
            yield f"the check {name} is missing"
    for name in listed:
        if name not in asked or listed.count(name) > 1:
            yield f"the check {name} was not asked for, or is there twice"


def _judged_otherwise(result: CheckResult, again: CheckResult) -> Iterator[str]:
    for test, held in zip(result.tests, again.tests, strict=True):
        same = math.isclose(test.allowed, held.allowed, rel_tol=1e-9) or test.allowed is held.allowed
        if not same or test.failed != held.failed:
            said = "failed" if held.failed else "holds"
            yield f"{result.id}: the test '{test.name}' {said} when it is judged again, against other allowances"
    if result.verdict is not again.verdict:
        yield f"{result.id} is {result.verdict}, but its tests give {again.verdict}"


def _impossible_pass(result: CheckResult, plan: Mapping[str, Any]) -> Iterator[str]:
    """What no run of the check can have ended in PASS with."""
    if result.verdict is not Verdict.PASS:
        return
    broken = [found for found in result.findings if found.severity is Verdict.FAIL]
    if broken:
        yield f"{result.id} is PASS, but records a finding that breaks it: {broken[0].text}"
    name = _MUST_BE_ZERO.get(result.id, "")
    if result.measurements.get(name, 0) != 0:
        yield f"{result.id} is PASS with {name} = {result.measurements[name]}"
    if result.num_samples < 1:
        yield f"{result.id} is PASS on {result.num_samples} {result.sample_unit}"
    if result.id in NEEDED and all(test.p_value is None and test.log10_e is None for test in result.tests):
        yield f"{result.id} is PASS without any test that says so"
    seen, wanted = result.smallest_detectable, plan["largest_undetected_shift"]
    if result.id == "lossless" and (seen is None or not 0 < seen <= wanted):
        yield f"lossless is PASS though it could not see a shift of {wanted:g}, as its plan wants"
    if result.id == "exactness" and not _number(result, "largest_tv") <= (seen or 0):
        yield "exactness is PASS with a larger TV distance than it allows"
    if result.id == "acceptance" and _number(result, "expected_acceptance_high") < plan["minimum_acceptance"]:
        yield f"acceptance is PASS below the plan's minimum of {plan['minimum_acceptance']:g}"
    if result.id == "cost" and not _number(result, "measured_speedup_low") > plan["minimum_speedup"]:
        yield f"cost is PASS though its interval reaches down to the plan's minimum of {plan['minimum_speedup']:g}"


# ---------------------------------------------------------------------------------------------- the files


def differing_files(certificate: Certificate, found: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Every file that was changed, added or taken away since; `found` are the digests of what is about to be served, by role."""
    models = {"target": certificate.target, "draft": certificate.draft}
    files = {role: model.files for role, model in models.items() if model is not None}
    exchanged = dict(zip(files, reversed(files.values()), strict=True))
    if len(files) == 2 and found == exchanged != files:
        yield "TARGET and DRAFT are the wrong way round: each is what was certified as the other"
        return
    for role, model in models.items():
        if role in found:
            yield from _differing(role, model, found[role])
        elif model is not None:
            yield f"a {role} was certified ({model.name}); give it too"


def _differing(role: str, certified: ModelFingerprint | None, found: Mapping[str, str]) -> Iterator[str]:
    if certified is None:
        yield f"a {role} is about to be served, but none was certified"
        return
    if not certified.files:
        yield f"the {role} was certified in memory ({certified.name}), so no file can be held against it; certify the folder"
        return
    for name in sorted({*certified.files, *found}):
        if name not in found:
            yield f"{role}: {name} is missing"
        elif name not in certified.files:
            yield f"{role}: {name} was added"
        elif found[name] != certified.files[name]:
            yield f"{role}: {name} was changed ({certified.files[name][:12]} was certified, this is {found[name][:12]})"


# ---------------------------------------------------------------------------------------------- the policy


def unmet(certificate: Certificate, policy: Policy, *, now: datetime | None = None) -> Iterator[Refusal]:
    """What the verdict, or the policy, holds against letting the pair out."""
    by_id = {result.id: result for result in certificate.checks}
    if certificate.fault:
        yield _verdict(f"a fault was planted ({certificate.fault}), so the certificate is a demonstration")
    if certificate.plan.get("only"):
        yield _verdict("not all checks were run (--only); only a run of all can let a pair out")
    for result in certificate.checks:
        tolerated = result.verdict is Verdict.INCONCLUSIVE and result.id in policy.tolerated_inconclusive
        if result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) and not tolerated:
            yield _verdict(f"{result.id} is {result.verdict}: {result.summary}")
    for name in dict.fromkeys((*NEEDED, *policy.required_checks)):
        if name not in by_id or by_id[name].verdict is Verdict.NOT_RUN:
            yield _policy(f"{name} is required and did not run")
    yield from _about_the_age(certificate.created, policy.maximum_age_days, now or datetime.now(UTC))
    yield from map(_policy, _about_the_run(certificate, policy))
    yield from map(_policy, _about_the_evidence(policy, by_id))


def _about_the_run(certificate: Certificate, policy: Policy) -> Iterator[str]:
    yield from foreseen(
        policy,
        certificate.environment,
        engine=certificate.engine,
        trust_remote_code=certificate.trust_remote_code,
        num_prompts=certificate.num_prompts,
    )
    rate = certificate.error_budget.false_fail_rate
    if policy.maximum_false_fail_rate is not None and rate > policy.maximum_false_fail_rate:
        yield f"its error budget is {rate:g}, {policy.maximum_false_fail_rate:g} is allowed"


def foreseen(
    policy: Policy, environment: Environment, *, engine: str, trust_remote_code: bool, num_prompts: int
) -> Iterator[str]:
    """What a policy holds against a run before its first token is decoded."""
    for name, wanted in policy.versions.items():
        if not _fits(found := str(getattr(environment, name)), wanted):
            yield f"{name} is {found}, {wanted} is wanted"
    if policy.devices and not environment.device.startswith(policy.devices):
        yield f"the device is {environment.device}, allowed: {', '.join(policy.devices)}"
    if policy.dtypes and environment.dtype not in policy.dtypes:
        yield f"the dtype is {environment.dtype}, allowed: {', '.join(policy.dtypes)}"
    if policy.engines and engine not in policy.engines:
        yield f"the engine under test is {engine}, allowed: {', '.join(policy.engines)}"
    if trust_remote_code and not policy.allow_remote_code:
        yield "code that a model brings along is run, and allow_remote_code is not set"
    if num_prompts < policy.minimum_prompts:
        yield f"it is made from {num_prompts} prompts, {policy.minimum_prompts} are wanted"


def _about_the_age(created: str, allowed: float | None, now: datetime) -> Iterator[Refusal]:
    try:
        age_days = (now - datetime.fromisoformat(created)).total_seconds() / 86_400
    except (ValueError, TypeError):
        age_days = math.nan
    if not age_days > -1:  # a clock may be an hour off, not a day
        yield _verdict(f"it claims to have been made at {created}, which is no time before now")
    elif allowed is not None and age_days > allowed:
        yield _policy(f"it was made {age_days:.1f} days ago, {allowed:g} are allowed")


def _about_the_evidence(policy: Policy, by_id: Mapping[str, CheckResult]) -> Iterator[str]:
    for name, wanted in policy.minimum_samples.items():
        result = by_id.get(name)
        if result is None or result.num_samples < wanted:
            yield f"{name} saw {result.num_samples if result else 0:,} samples, {wanted:,} are wanted"
    lossless = by_id.get("lossless")
    shift = policy.largest_undetected_shift
    if shift and not (lossless and lossless.smallest_detectable is not None and lossless.smallest_detectable <= shift):
        seen = (
            f"{lossless.smallest_detectable:.2g}"
            if lossless and lossless.smallest_detectable is not None
            else "nothing"
        )
        yield f"the smallest shift that lossless sees is {seen}, {shift:g} is wanted"
    for check_id, key, what, wanted_at_least in (
        ("acceptance", "expected_acceptance_low", "the lower end of acceptance", policy.minimum_acceptance),
        ("cost", "measured_speedup_low", "the lower end of the speed-up", policy.minimum_speedup),
        *(
            ("acceptance", f"{_IN_DOMAIN}{name}", f"acceptance in the domain '{name}'", each.minimum_acceptance)
            for name, each in policy.domains.items()
        ),
    ):
        found = _figure(by_id, check_id, key)
        if not wanted_at_least or found >= wanted_at_least:
            continue
        seen = "not known" if math.isnan(found) else f"{found:.3g}"
        if math.isnan(found) and key.startswith(_IN_DOMAIN) and check_id in by_id:
            measured = [
                name.removeprefix(_IN_DOMAIN) for name in by_id[check_id].measurements if name.startswith(_IN_DOMAIN)
            ]
            seen += f", for no prompt that was measured has it (there were: {', '.join(measured) or 'none'})"
        yield f"{what} is {seen}, {wanted_at_least:g} is wanted"
    flips = _figure(by_id, "greedy", "num_tolerated_flips")
    if policy.maximum_tolerated_flips is not None and not flips <= policy.maximum_tolerated_flips:
        yield f"{flips:g} near ties went the other way at temperature 0, {policy.maximum_tolerated_flips} are allowed"


def _figure(by_id: Mapping[str, CheckResult], check_id: str, key: str) -> float:
    return _number(by_id[check_id], key) if check_id in by_id else math.nan


def _number(result: CheckResult, key: str) -> float:
    """A measurement; NaN where it is missing or no number."""
    value = result.measurements.get(key)
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _fits(found: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(Version(found), prereleases=True)
    except ValueError:  # no version, or a number of thousands of digits
        return False


def _verdict(text: str) -> Refusal:
    return Refusal(reason=Reason.VERDICT, text=text)


def _policy(text: str) -> Refusal:
    return Refusal(reason=Reason.POLICY, text=text)
