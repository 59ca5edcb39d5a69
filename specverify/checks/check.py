"""The seam of a check: what to ask, when enough is known, and what the answers show.

Note [Verdict of a check]: `conclude` decides what needs no error budget (a violated support, a wrong token, too little
evidence) and reports its statistical tests as they are. The judge alone (`certify.judge`) holds all tests of a run against
one error budget, fails them, and turns the verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.records import CheckResult, DecodeRequest, SamplingParams

if TYPE_CHECKING:
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces
    from specverify.subject import EncodedPrompt, Subject

__all__ = ["Check", "Round", "Unscored", "asked", "derived_seed", "not_honoured", "reproduce", "sampling", "spread"]

T = TypeVar("T")

Round = Sequence[DecodeRequest]
"""Requests that are handed to the engine together: each other's neighbours."""


class Unscored(tuple[DecodeRequest, ...]):
    """A round of which only the tokens are wanted, so that nothing is scored."""

    __slots__ = ()


def _ask_nothing(subject: Subject, plan: Plan) -> Iterable[Round]:
    del subject, plan
    return ()


def _never(plan: Plan, scored: ScoredTraces) -> bool:
    del plan, scored
    return False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim."""

    id: str
    claim: str
    conclude: Callable[[Subject, Plan, ScoredTraces], CheckResult]
    """From everything that was answered, in the order in which it was asked."""
    rounds: Callable[[Subject, Plan], Iterable[Round]] = _ask_nothing
    """Rounds that two checks share are decoded and scored once."""
    decided: Callable[[Plan, ScoredTraces], bool] = _never
    """Whether enough is known, or a FAIL is certain; the rest is then not asked."""
    wanted_tokens: Callable[[Plan], int] | None = None
    """Tokens after which enough is known, where `decided` counts them: the unit of progress."""


def derived_seed(seed: int, *names: str) -> int:
    """A 63-bit seed of its own for every purpose: requests that should be independent need different seeds."""
    digest = hashlib.sha256("\x00".join((str(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def asked(
    purpose: str,
    plan: Plan,
    prompts: Iterable[EncodedPrompt],
    params: SamplingParams,
    *,
    num_samples: int = 1,
    speculation: bool = True,
) -> tuple[DecodeRequest, ...]:
    """One request a prompt, with a seed that depends on the plan's seed, the purpose and the prompt."""
    return tuple(
        DecodeRequest(
            id=f"{purpose}/{prompt.id}",
            prompt_ids=prompt.token_ids,
            params=params,
            seed=derived_seed(plan.seed, purpose, prompt.id),
            num_samples=num_samples,
            speculation=speculation,
            prompt_id=prompt.id,
            domain=prompt.domain,
        )
        for prompt in prompts
    )


def spread(items: tuple[T, ...], most: int) -> tuple[T, ...]:
    """At most `most` of the items, evenly spread, so that every domain is met."""
    if len(items) <= most:
        return items
    return tuple(items[int(place)] for place in np.linspace(0, len(items) - 1, most))


def sampling(subject: Subject, plan: Plan, params: SamplingParams | None = None) -> SamplingParams:
    """The plan's (or a cell's) parameters with the plan's length and the pair's EOS ids."""
    return replace(params or plan.params, max_new_tokens=plan.max_new_tokens, eos_token_ids=subject.eos_token_ids)


def not_honoured(subject: Subject, params: SamplingParams) -> frozenset[str]:
    """What a request sets and the engine doesn't honour: it is not asked, for nothing is shown by what was never promised.

    The pair's own EOS ids always go along: an engine that takes none has them from the model's folder.
    """
    usual = SamplingParams(eos_token_ids=subject.eos_token_ids)
    lacks = ALL_PARAMETERS - subject.engine.parameters
    if Capability.STOP_STRINGS not in subject.engine.capabilities:
        lacks |= {"stop_strings"}
    asked_for = {name for name in lacks if getattr(params, name) != getattr(usual, name)}
    return frozenset(asked_for if params.eos_token_ids else asked_for - {"eos_token_ids"})


def reproduce(subject: Subject, plan: Plan, check_id: str) -> str:
    """The one command that shows a result again."""
    return f"{subject.command} --only {check_id} --seed {plan.seed} --budget {plan.budget}"
