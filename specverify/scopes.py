"""How small is small enough? Rules proved in fractions, and the scopes at which each wrong rule shows itself.

Note [Completed block]: what a rule emits in a step is a block of random length, and its law is neither the law of its first
token nor that of blocks of one length: both are wrong for right rules, or right for wrong ones. So the block is completed by
the target itself to one token more than are drafted, R(x) = Σ P(block x_1..x_l) Π p(x_i | x_<i), and R is held against the
target's law of so many tokens [Sun2025]. With fractions in, fractions come out (Note [Fractions] in `choices.enumerate`): a
distance of 0 is then a proof for that instance. On each sign pattern of p - q the distance is a rational function of the
entries, so that 0 on a few random instances is as good as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from specverify.decoding import Decoder
from specverify.drafting import drafter_for
from specverify.faults import FAULTS
from specverify.law import Block, exact_step_laws, step_laws
from specverify.models.table import TableModel
from specverify.qualify.instances import Instance, random_instance
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specverify.qualify.instances import Prefix, Row
    from specverify.verification.rules import NamedRule

__all__ = [
    "SCOPES",
    "Scope",
    "decoder_over",
    "distances",
    "edge_instances",
    "exact_distances",
    "kills",
    "mutants",
    "random_instances",
    "scope_table",
]

Weight = Any
"""A float, or a fraction."""

_PROOF = 1e-12
"""TV distance that rounding doesn't explain in float64."""


@dataclass(frozen=True, order=True)
class Scope:
    """Ids of a vocabulary, and tokens drafted one after the other."""

    vocab_size: int
    num_drafts: int


SCOPES = (Scope(2, 1), Scope(2, 2), Scope(3, 2), Scope(4, 2), Scope(3, 3), Scope(4, 3))
"""From the smallest up; the last is what rules are proved at."""


def random_instances(scope: Scope, number: int = 12, *, denominator: int = 15) -> tuple[Instance, ...]:
    """Rows of multiples of 1/denominator, none of them 0; fifteenths are rounded in every dtype."""
    return tuple(
        random_instance(scope.vocab_size, scope.num_drafts, seed=seed, denominator=denominator)
        for seed in range(number)
    )


def edge_instances(scope: Scope = SCOPES[-1]) -> tuple[Instance, ...]:
    """Where rules go wrong: p = q, disjoint supports, point masses, zeros on either side, ties, an id that isn't drafted."""
    one, two = (
        random_instance(scope.vocab_size, scope.num_drafts, seed=100 + seed, denominator=16) for seed in range(2)
    )
    last = scope.vocab_size - 1

    def changed(
        name: str, target: Callable[[Prefix, Row], Row] | None = None, draft: Callable[[Prefix, Row], Row] | None = None
    ) -> Instance:
        return replace(
            one,
            name=name,
            target={at: target(at, row) if target else row for at, row in one.target.items()},
            draft={at: draft(at, row) if draft else row for at, row in one.draft.items()},
        )

    def point(at: Prefix, row: Row) -> Row:
        return tuple(Fraction(int(token == (sum(at) + len(at)) % len(row))) for token in range(len(row)))

    def without(token: int) -> Callable[[Prefix, Row], Row]:
        return lambda _, row: tuple(
            Fraction(0) if each == token else share / (1 - row[token]) for each, share in enumerate(row)
        )

    def only(ids: set[int]) -> Callable[[Prefix, Row], Row]:
        return lambda _, row: tuple(Fraction(int(each in ids), len(ids)) for each in range(len(row)))

    lower, upper = set(range(last // 2 + 1)), set(range(last // 2 + 1, last + 1))
    return (
        changed("p = q", draft=lambda at, _: one.target[at]),
        changed("disjoint supports", only(lower), only(upper)),
        changed("one-hot target", target=point),
        changed("one-hot draft", draft=point),
        changed("q = 0 < p", draft=without(0)),
        changed("p = 0 < q", target=without(0)),
        changed("zeros in both", target=without(0), draft=without(last)),
        changed("ties", draft=lambda at, row: (*one.target[at][:2], *_filled(one.target[at][:2], row[2:]))),
        changed("an id that the draft hasn't", draft=without(last)),
        replace(two, name="another random one"),
    )


def _filled(taken: Sequence[Fraction], rest: Sequence[Fraction]) -> list[Fraction]:
    """What is left to 1, evenly."""
    return [(1 - sum(taken, Fraction(0))) / len(rest)] * len(rest) if rest else []


# ------------------------------------------------------------------------------------------------ tables of instances


def _prompts(vocab_size: int, number: int) -> list[Prefix]:
    """As many prompts of one length."""
    length = next(length for length in range(1, 64) if vocab_size**length >= number)
    return list(product(range(vocab_size), repeat=length))[:number]


def _stacked(tables: Sequence[Mapping[Prefix, Row]], vocab_size: int, longest: int) -> TableModel:
    """One table in which the laws after prompt i are those of table i."""
    prompts = _prompts(vocab_size, len(tables))
    even = tuple(Fraction(1, vocab_size) for _ in range(vocab_size))
    levels = []
    for length in range(len(prompts[0]) + longest + 1):
        rows = []
        for prefix in product(range(vocab_size), repeat=length):
            prompt, rest = prefix[: len(prompts[0])], prefix[len(prompts[0]) :]
            table = tables[prompts.index(prompt)] if prompt in prompts else {}
            rows.append([float(each) for each in table.get(rest, even)])
        levels.append(torch.tensor(rows, dtype=torch.float64).log())
    return TableModel(tuple(levels))


def decoder_over(instances: Sequence[Instance], named: NamedRule, *, branching: Sequence[int] = (2, 1)) -> Decoder:
    """A decoder over all of the instances, which must be of one scope; the first tokens of a prompt say which is meant."""
    vocab_size, num_drafts = instances[0].vocab_size, instances[0].num_drafts
    target, draft = (
        _stacked([getattr(each, name) for each in instances], vocab_size, num_drafts + 1)
        for name in ("target", "draft")
    )
    return Decoder(
        target=target,
        drafter=drafter_for(named.drafts, draft, vocab_size, branching=branching[:num_drafts]),
        rule=named.rule,
        drafts=named.drafts,
        num_speculative_tokens=num_drafts,
    )


def _requests(instances: Sequence[Instance], length: int, eos: tuple[int, ...]) -> list[DecodeRequest]:
    params = SamplingParams(max_new_tokens=length, eos_token_ids=eos)
    prompts = _prompts(instances[0].vocab_size, len(instances))
    return [DecodeRequest(id=str(number), prompt_ids=prompt, params=params) for number, prompt in enumerate(prompts)]


# ------------------------------------------------------------------------------------------------ laws and distances


def _completed(
    laws: Mapping[Prefix, Weight], instance: Instance, length: int, eos: tuple[int, ...]
) -> dict[Prefix, Weight]:
    """Texts of `length`, or up to an EOS, from beginnings of them."""
    complete: dict[Prefix, Weight] = {}
    growing = dict(laws)
    while growing:
        longer: dict[Prefix, Weight] = {}
        for ids, weight in growing.items():
            if len(ids) == length or (ids[-1:] and ids[-1] in eos):
                complete[ids] = complete.get(ids, 0 * weight) + weight
                continue
            for token, share in enumerate(instance.target[ids]):
                if share:
                    exact = weight * (share if isinstance(weight, Fraction) else float(share))
                    longer[*ids, token] = longer.get((*ids, token), 0 * weight) + exact
        growing = longer
    return complete


def _distance(
    law: Mapping[Block, Weight], instance: Instance, length: int, eos: tuple[int, ...], one: Weight
) -> Weight:
    begun: dict[Prefix, Weight] = {}
    for block, weight in law.items():
        begun[block.token_ids] = begun.get(block.token_ids, 0 * weight) + weight
    actual = _completed(begun, instance, length, eos)
    wanted = _completed({(): one}, instance, length, eos)
    apart = [abs(actual.get(ids, 0 * one) - wanted.get(ids, 0 * one)) for ids in {*actual, *wanted}]
    total: Weight = sum(apart, 0 * one)
    return total / 2


def distances(
    decoder: Decoder, instances: Sequence[Instance], *, eos: tuple[int, ...] = (), length: int = 0
) -> list[float]:
    """TV distance of the completed block's law from the target's, in float64, at each instance."""
    length = length or instances[0].num_drafts + 1
    laws = step_laws(decoder, _requests(instances, length, eos))
    return [_distance(law, instance, length, eos, 1.0) for law, instance in zip(laws, instances, strict=True)]


def exact_distances(
    decoder: Decoder, instances: Sequence[Instance], *, eos: tuple[int, ...] = (), length: int = 0
) -> list[Fraction]:
    """The same in fractions: 0 is a proof. Raises `InternalError` where a rule asks for something that is no fraction."""
    length = length or instances[0].num_drafts + 1
    laws = exact_step_laws(decoder, _requests(instances, length, eos))
    return [_distance(law, instance, length, eos, Fraction(1)) for law, instance in zip(laws, instances, strict=True)]


# ------------------------------------------------------------------------------------------------ wrong rules


def mutants() -> dict[str, Callable[[Decoder], Decoder]]:
    """Wrong rules and laws that show in one block: planted faults that `exactness` must fail on."""
    return {fault.name: fault.apply for fault in FAULTS if "exactness" in fault.caught_by}


def kills(change: Callable[[Decoder], Decoder], named: NamedRule, scope: Scope, *, number: int = 12) -> int:
    """In how many random instances of the scope a wrong rule shows itself."""
    instances = random_instances(scope, number)
    decoder = change(decoder_over(instances, named))
    return sum(distance > _PROOF for distance in distances(decoder, instances))


def scope_table(names: Sequence[str] = (), *, number: int = 12) -> dict[str, tuple[int, ...]]:
    """For each wrong rule, in how many of `number` random instances of each of `SCOPES` it shows itself."""
    chosen = {name: change for name, change in mutants().items() if not names or name in names}
    return {
        name: tuple(kills(change, RULES["chain"], scope, number=number) for scope in SCOPES)
        for name, change in chosen.items()
    }
