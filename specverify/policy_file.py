"""Policies as TOML: read strictly, described by a JSON schema, and written with a comment beside each key."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from pydantic import TypeAdapter, ValidationError

from specverify.codec import first_fault, nearest, read_table
from specverify.errors import PolicyError
from specverify.plan import CHECK_IDS, ON_REQUEST_IDS
from specverify.policy import DomainPolicy, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["VERSIONED", "commented_policy", "policy_schema", "read_policy"]

VERSIONED = ("specverify", "python", "torch", "transformers")
"""What `versions` may name."""
_CHECKS = CHECK_IDS + ON_REQUEST_IDS
_EXAMPLES: dict[str, str] = {
    "required_checks": '["compatibility", "greedy", "lossless"]',
    "tolerated_inconclusive": '["cost"]',
    "maximum_age_days": "30",
    "versions": '{ transformers = ">=5.17,<5.25", torch = ">=2.11" }',
    "devices": '["cuda: NVIDIA H200", "cpu"]',
    "dtypes": '["bfloat16", "float32"]',
    "engines": '["reference"]',
    "minimum_acceptance": "0.6",
    "minimum_speedup": "1.1",
    "maximum_tolerated_flips": "5",
    "maximum_false_fail_rate": "1e-6",
    "largest_undetected_shift": "0.05",
    "minimum_prompts": "50",
    "minimum_samples": "{ lossless = 7000, greedy = 500 }",
    "allow_remote_code": "false",
    "domains": "{ code = { minimum_acceptance = 0.5 } }",
}
"""A value for each key, as one might want it."""


def read_policy(path: str | Path) -> Policy:
    """A policy from TOML; raises `PolicyError` that names the key, what it may be, and the nearest known name."""
    table = read_table(path, "the policy", PolicyError)
    source = f"the policy {path}"
    _require_known(table, Policy, source, prefix="")
    for name, domain in table["domains"].items() if isinstance(table.get("domains"), dict) else ():
        if isinstance(domain, dict):
            _require_known(domain, DomainPolicy, source, prefix=f"domains.{name}.")
    try:
        policy: Policy = _adapter().validate_json(json.dumps(table), strict=True, extra="forbid")
    except ValidationError as error:
        msg = f"{source}: {first_fault(error)}"
        raise PolicyError(msg) from error
    _require_sensible(policy, source)
    return policy


def policy_schema() -> dict[str, Any]:
    """The JSON schema of a policy, for editors and for other tools."""
    schema = _adapter().json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for definition in (schema, *schema.get("$defs", {}).values()):
        definition["additionalProperties"] = False
    return schema


def commented_policy() -> str:
    """A policy as `specverify init` writes it: what holds anyway as it is, everything else as a comment to take up."""
    described = policy_schema()["properties"]
    lines = [
        "# What `specverify gate` wants of a certificate before a pair is let out; every key may be left out.",
        "# The schema, for an editor: specverify init --schema",
        "",
    ]
    for each in fields(Policy):
        lines += [f"# {described[each.name]['description']}"]
        lines += [f"{'' if each.name == 'required_checks' else '# '}{each.name} = {_EXAMPLES[each.name]}", ""]
    return "\n".join(lines)


def _adapter() -> TypeAdapter[Policy]:
    return TypeAdapter(Policy)


def _require_known(table: Mapping[str, object], kind: type, source: str, *, prefix: str) -> None:
    known = [each.name for each in fields(kind)]
    for key in table:
        if key not in known:
            msg = f"{source} has the unknown key '{prefix}{key}'; {nearest(key, known)}"
            raise PolicyError(msg)


def _require_sensible(policy: Policy, source: str) -> None:
    """Names that are known, numbers that can be reached."""
    _require_names(policy.required_checks, _CHECKS, source, "required_checks")
    _require_names(policy.tolerated_inconclusive, _CHECKS, source, "tolerated_inconclusive")
    _require_names(policy.minimum_samples, _CHECKS, source, "minimum_samples")
    _require_names(policy.versions, VERSIONED, source, "versions")
    if both := set(policy.required_checks) & set(policy.tolerated_inconclusive):
        msg = f"{source} requires {min(both)} and tolerates that it is inconclusive; drop one"
        raise PolicyError(msg)
    for key in ("devices", "dtypes", "engines", "versions"):
        named = getattr(policy, key)
        if not all(map(str.strip, named.values() if key == "versions" else named)):
            msg = f"{source} has an empty text in {key}; fill it in, or leave it out to allow any"
            raise PolicyError(msg)
    for name, wanted in policy.versions.items():
        try:
            SpecifierSet(wanted).contains("0")  # some versions are read only now
        except ValueError as error:  # no specifier, or a number of thousands of digits
            msg = f"{source} sets versions.{name} to {wanted!r:.60}, which is no range such as '>=2.11,<3'"
            raise PolicyError(msg) from error
    shares = {
        "minimum_acceptance": policy.minimum_acceptance,
        "maximum_false_fail_rate": policy.maximum_false_fail_rate,
    }
    shares |= {"largest_undetected_shift": policy.largest_undetected_shift}
    shares |= {f"domains.{name}.minimum_acceptance": each.minimum_acceptance for name, each in policy.domains.items()}
    for key, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            msg = f"{source} sets {key} to {share}; it must be at least 0 and at most 1"
            raise PolicyError(msg)
    counts = {name: getattr(policy, name) for name in ("maximum_age_days", "minimum_speedup", "minimum_prompts")}
    counts |= {"maximum_tolerated_flips": policy.maximum_tolerated_flips}
    counts |= {f"minimum_samples.{name}": number for name, number in policy.minimum_samples.items()}
    for key, number in counts.items():
        if number is not None and not 0 <= number < float("inf"):
            msg = f"{source} sets {key} to {number}; it must be a number from 0 on"
            raise PolicyError(msg)


def _require_names(names: Iterable[str], known: Iterable[str], source: str, key: str) -> None:
    for name in names:
        if name not in known:
            msg = f"{source} names the unknown '{name}' in {key}; {nearest(name, known)}"
            raise PolicyError(msg)
