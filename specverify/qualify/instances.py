"""Small pairs of laws in simple fractions, from the smallest up, so that the first failure is one that a person can check.

Every row depends on the whole prefix (Note [Whole-prefix tables] in `models.table`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Instance", "Prefix", "Row", "instances", "point_mass_instances", "random_instance", "same_laws", "shrunk"]

Prefix = tuple[int, ...]
Row = tuple[Fraction, ...]


@dataclass(frozen=True)
class Instance:
    """A target's row after each prefix of up to `num_drafts` ids, and a draft's after each shorter one."""

    name: str
    num_drafts: int
    target: dict[Prefix, Row]
    draft: dict[Prefix, Row]

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.target[()])

    @property
    def size(self) -> tuple[int, int, int]:
        """What "smaller" means: ids times drafts, then ids, then how complicated the fractions are."""
        rows = [*self.target.values(), *self.draft.values()]
        return (
            self.vocab_size * self.num_drafts,
            self.vocab_size,
            sum(each.denominator for row in rows for each in row) + len(set(rows)),
        )


def random_instance(
    vocab_size: int, num_drafts: int, *, seed: int, denominator: int = 8, zeros: float = 0.0, name: str = ""
) -> Instance:
    """Rows of multiples of 1/denominator; an entry is 0 with probability `zeros`, and positive otherwise."""
    rng = random.Random(seed)  # noqa: S311 - examples, not secrets

    def row() -> Row:
        alive = [token for token in range(vocab_size) if rng.random() >= zeros] or [rng.randrange(vocab_size)]
        cuts = sorted(rng.sample(range(1, denominator), min(len(alive), denominator) - 1))
        parts = [end - start for start, end in zip([0, *cuts], [*cuts, denominator], strict=True)]
        mass = dict(zip(alive, parts, strict=False))
        return tuple(Fraction(mass.get(token, 0), denominator) for token in range(vocab_size))

    target = {prefix: row() for prefix in _prefixes(vocab_size, num_drafts)}
    draft = {prefix: row() for prefix in _prefixes(vocab_size, num_drafts - 1)}
    return Instance(name or f"random {seed}", num_drafts, target, draft)


def _prefixes(vocab_size: int, longest: int) -> Iterator[Prefix]:
    for length in range(longest + 1):
        yield from product(range(vocab_size), repeat=length)


def instances(*, seed: int = 0) -> tuple[Instance, ...]:
    """What every claim is held on, smallest first: plain ones, zeros on either side, disjoint supports, one-hot rows.

    The largest has the study's scope, 4 ids and 3 drafts, which the mutants that are hardest to see need.
    """
    scopes = [(2, 1, 3, 4, 0.0), (3, 1, 3, 8, 0.0), (3, 1, 3, 4, 0.4), (2, 2, 3, 4, 0.0), (2, 2, 2, 8, 0.3)]
    scopes += [(3, 2, 3, 8, 0.0), (3, 2, 2, 4, 0.35), (4, 1, 1, 16, 0.0)]
    scopes += [(2, 3, 1, 8, 0.0), (4, 3, 1, 16, 0.0)]
    made = [
        random_instance(vocab, drafts, seed=1000 * seed + 10 * place + index, denominator=denominator, zeros=zeros)
        for place, (vocab, drafts, count, denominator, zeros) in enumerate(scopes)
        for index in range(count)
    ]
    whole, nothing, half = Fraction(1), Fraction(0), Fraction(1, 2)
    apart = random_instance(3, 1, seed=seed, denominator=4, name="disjoint supports")
    made.append(
        replace(apart, target=dict.fromkeys(apart.target, (half, half, nothing)), draft={(): (nothing, nothing, whole)})
    )
    made.append(replace(apart, name="one-hot target", target={**apart.target, (): (nothing, whole, nothing)}))
    return tuple(sorted(made, key=lambda each: each.size))


def point_mass_instances(*, seed: int = 0) -> tuple[Instance, ...]:
    """A draft that draws nothing: each of its rows is a point mass, as prompt lookup and greedy drafting give."""
    made = []
    for index, (vocab, drafts) in enumerate([(2, 1), (3, 1), (2, 2), (3, 2)]):
        one = random_instance(vocab, drafts, seed=1000 * seed + 500 + index, zeros=0.2)
        draft = {
            prefix: tuple(Fraction(int(token == (len(prefix) + index + sum(prefix)) % vocab)) for token in range(vocab))
            for prefix in one.draft
        }
        made.append(replace(one, name=f"point masses {index}", draft=draft))
    return tuple(made)


def same_laws(*, seed: int = 0) -> tuple[Instance, ...]:
    """Target and draft are equal: nothing may be rejected, and no residual has mass."""
    made = [
        random_instance(vocab, drafts, seed=1000 * seed + 600 + drafts, zeros=0.2) for vocab, drafts in [(2, 1), (3, 2)]
    ]
    return tuple(replace(one, name="p = q", draft={prefix: one.target[prefix] for prefix in one.draft}) for one in made)


# ---------------------------------------------------------------------------------------------- smaller


def shrunk(instance: Instance, fails: Callable[[Instance], bool], *, most_trials: int = 60) -> Instance:
    """A smaller instance that still fails: rows replaced by simpler ones, one at a time, while that is so."""
    trials = 0
    while trials < most_trials:
        for candidate in _simpler(instance):
            if candidate.size < instance.size and trials < most_trials:
                trials += 1
                if fails(candidate):
                    instance = candidate
                    break
        else:
            return instance
    return instance


def _simpler(instance: Instance) -> Iterator[Instance]:
    """One row simpler: even, halves, quarters, or equal to the row before it."""
    vocab = instance.vocab_size
    simple: list[Row] = [tuple(Fraction(1, vocab) for _ in range(vocab))]
    quarters = [Fraction(n, 4) for n in range(5)]
    simple += [row for row in product(quarters, repeat=vocab) if sum(row) == 1 and all(each > 0 for each in row[:2])][
        :6
    ]
    for table in ("target", "draft"):
        rows: dict[Prefix, Row] = getattr(instance, table)
        for prefix, before in rows.items():
            for row in [*simple, *([rows[prefix[:-1]]] if prefix else [])]:
                if row != before:
                    changed = {**rows, prefix: row}
                    yield replace(instance, target=changed) if table == "target" else replace(instance, draft=changed)
