"""Somebody else's verifier: is this function lossless, and if not, what is the smallest example?

The function runs as it is. Where its randomness can be followed (`lazy`), its law is computed over every path and nothing
is sampled; where not, large tables are sampled and tested, and the result says which it was.

Flow: a function → `shapes` (how it is called) → `laws` (what it emits on small `instances`) → `claims` → `Qualification`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specverify.callables import resolved
from specverify.errors import PlanError
from specverify.qualify.claims import CLAIMS, Claim, ClaimResult, Exact
from specverify.qualify.laws import Subject, subject
from specverify.qualify.paths import NotFollowed
from specverify.qualify.sampled import sampled_claims
from specverify.records import Verdict
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Qualification", "load_rule", "qualify"]


@dataclass(frozen=True, kw_only=True)
class Qualification:
    """What was found about one function."""

    rule: str
    shape: str
    method: str
    """`exact`, or `sampled` with the reason."""
    seed: int
    claims: tuple[ClaimResult, ...]

    @property
    def verdict(self) -> Verdict:
        """FAIL where a claim fails, INCONCLUSIVE where one couldn't be decided, else PASS."""
        verdicts = {result.verdict for result in self.claims}
        return next((each for each in (Verdict.FAIL, Verdict.INCONCLUSIVE) if each in verdicts), Verdict.PASS)

    @property
    def blamed(self) -> ClaimResult | None:
        """The first claim that fails: the likeliest cause of the others."""
        return next((result for result in self.claims if result.verdict is Verdict.FAIL), None)


def load_rule(name: str) -> Callable[..., Any]:
    """The function of `module:function`, the current folder being importable, or one of our rules by its name.

    Raises `PlanError` where there is none.
    """
    if name in RULES:
        return RULES[name].rule
    if ":" not in name:
        msg = f"'{name}' names no function; write module:function, or one of {', '.join(RULES)}"
        raise PlanError(msg)
    return resolved(name)


def qualify(function: Callable[..., Any], *, name: str = "", shape: str | None = None, seed: int = 0) -> Qualification:
    """Hold every claim on the function, as it is.

    `shape` names how it is called; without it, its parameters say. Raises `PlanError` where they don't.
    """
    asked = subject(name or getattr(function, "__qualname__", repr(function)), function, shape)
    exact = Exact(asked, seed=seed)
    try:
        first = CLAIMS[0].result(exact)
    except NotFollowed as error:
        return _found(asked, seed, f"sampled: {error}", sampled_claims(asked, seed=seed))
    if first.verdict is Verdict.FAIL:
        rest = [claim.not_run("it doesn't answer every call") for claim in CLAIMS[1:]]
        return _found(asked, seed, "exact", (first, *rest))
    return _found(asked, seed, "exact", (first, *(_followed(claim, exact) for claim in CLAIMS[1:])))


def _followed(claim: Claim, exact: Exact) -> ClaimResult:
    """One claim; not run where another dtype or neighbour can't be followed, or where it would fail with the law."""
    if claim.needs_the_law and exact.law_is_wrong():
        return claim.not_run("the law is wrong without that; mend it first")
    try:
        return claim.result(exact)
    except NotFollowed as error:
        return claim.not_run(f"its random numbers can't be followed here: {error}")


def _found(asked: Subject, seed: int, method: str, claims: tuple[ClaimResult, ...]) -> Qualification:
    return Qualification(rule=asked.name, shape=asked.shape.name, method=method, seed=seed, claims=claims)
