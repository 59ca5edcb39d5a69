"""A plan that a policy can be met with: what the gate will want of a certificate, asked for before it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specverify.checks.evidence import detectable_shift, tokens_needed

if TYPE_CHECKING:
    from specverify.plan import Plan
    from specverify.policy import Policy

__all__ = ["asked_by", "at_least", "with_enough_tokens"]

_SAME = {"minimum_acceptance": max, "minimum_speedup": max, "largest_undetected_shift": min}
"""Fields that plan and policy both have, and which of two values is the stricter; in a policy 0 is not set."""


def asked_by(plan: Plan, policy: Policy) -> Plan:
    """A plan of defaults with the policy's numbers in their place; what is set after it by hand goes before."""
    return replace(plan, **_set_in(policy))


def at_least(plan: Plan, policy: Policy) -> Plan:
    """A plan that is nowhere laxer than the policy: of two values the stricter, of two amounts the larger."""
    changes = {name: _SAME[name](getattr(plan, name), value) for name, value in _set_in(policy).items()}
    if policy.maximum_false_fail_rate is not None:
        changes["false_fail_rate"] = min(plan.false_fail_rate, policy.maximum_false_fail_rate)
    changes["lossless_tokens"] = max(plan.lossless_tokens, policy.minimum_samples.get("lossless", 0))
    changes["max_prompts"] = max(plan.max_prompts, policy.minimum_prompts)
    return replace(plan, **changes)


def with_enough_tokens(plan: Plan) -> Plan:
    """The same plan with the tokens of the stream that its shift and its error budget ask for, where it has fewer."""
    if detectable_shift(plan.lossless_tokens, plan) <= plan.largest_undetected_shift:
        return plan
    return replace(plan, lossless_tokens=tokens_needed(plan.largest_undetected_shift, plan))


def _set_in(policy: Policy) -> dict[str, Any]:
    return {name: value for name in _SAME if (value := getattr(policy, name))}
