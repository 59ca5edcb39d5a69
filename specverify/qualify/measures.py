"""How far the law of one call is from what each claim says, and where: numbers for a table of expected against actual."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.qualify.laws import Outcome, Weights, given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from specverify.qualify.instances import Instance, Prefix

__all__ = ["Case", "Deviation", "acceptance", "accepted_too_rarely", "bonus", "lossless", "residual", "support"]

Law = tuple[float, ...]


@dataclass(frozen=True)
class Deviation:
    """One claim on one instance."""

    effect: float
    """0 where the claim holds exactly."""
    said: str
    """The effect in words, as the end of a sentence about the function."""
    place: str = ""
    """Where the table below was taken."""
    table: tuple[tuple[str, float, float], ...] = ()
    """Label, expected and actual probability."""
    hints: tuple[str, ...] = ()
    """What it looks like: each wrong law that would give the same numbers here."""


@dataclass(frozen=True)
class Case:
    """The law of a call with one row, on an instance as the function was given it."""

    instance: Instance
    law: dict[Outcome, float]
    dtype: torch.dtype
    logits: bool
    num_drafts: int

    @staticmethod
    def of(
        instance: Instance, law: Weights, dtype: torch.dtype, *, logits: bool, num_drafts: int | None = None
    ) -> Case:
        """From the law of a call with one row."""
        rows = {outcome: weight for (outcome,), weight in law.items()}
        return Case(instance, rows, dtype, logits, instance.num_drafts if num_drafts is None else num_drafts)

    def target(self, prefix: Prefix) -> Law:
        """The law p after a prefix."""
        return given(self.instance.target[prefix], self.dtype, logits=self.logits)

    def draft(self, prefix: Prefix) -> Law:
        """The law q after a prefix."""
        return given(self.instance.draft[prefix], self.dtype, logits=self.logits)

    def prefixes(self, length: int) -> Iterable[Prefix]:
        """Drafted prefixes of that length that can be reached with all of it accepted, most likely first."""
        mass: defaultdict[Prefix, float] = defaultdict(float)
        for outcome, weight in self.law.items():
            if outcome.num_accepted >= length:
                mass[outcome.drafted[:length]] += weight
        return sorted(mass, key=lambda prefix: -mass[prefix])

    def mass(self, holds: Callable[[Outcome], bool]) -> float:
        """Probability of the outcomes for which it holds."""
        return math.fsum(weight for outcome, weight in self.law.items() if holds(outcome))


def _worst(deviations: Iterable[Deviation], otherwise: str) -> Deviation:
    return max(deviations, key=lambda each: each.effect, default=Deviation(0.0, otherwise))


def support(case: Case) -> Deviation:
    """The probability of an id that the target gives none."""
    impossible: defaultdict[tuple[Prefix, int], float] = defaultdict(float)
    for outcome, weight in case.law.items():
        for place, token in enumerate(outcome.emitted):
            if case.target(outcome.emitted[:place])[token] == 0:
                impossible[outcome.emitted[:place], token] += weight
                break
    table = tuple((f"{_after(prefix)}: id {token}", 0.0, weight) for (prefix, token), weight in impossible.items())
    effect = math.fsum(impossible.values())
    said = f"emits an id of target probability 0 with probability {_short(effect)}"
    hints = ("a draft of probability 0 passes where u <= p/q is asked and u is exactly 0",) if 0 < effect < 1e-2 else ()
    return Deviation(effect, said, "probability of an id that can't be", table, hints)


def lossless(case: Case) -> Deviation:
    """TV distance between the emitted block, continued by the target to g + 1 ids, and the target's law [Sun2025]."""
    length = case.num_drafts + 1
    actual: defaultdict[Prefix, float] = defaultdict(float)
    for outcome, weight in case.law.items():
        for ids, more in _continued(case, outcome.emitted, length).items():
            actual[ids] += weight * more
    expected = _continued(case, (), length)
    effect = math.fsum(abs(expected.get(ids, 0.0) - actual.get(ids, 0.0)) for ids in {*expected, *actual}) / 2
    worst = sorted({*expected, *actual}, key=lambda ids: -abs(expected.get(ids, 0.0) - actual.get(ids, 0.0)))[:8]
    table = tuple((_ids(ids), expected.get(ids, 0.0), actual.get(ids, 0.0)) for ids in sorted(worst))
    place = f"the first {length} ids, what is missing drawn from the target"
    return Deviation(effect, f"emits another law than the target's, TV {_short(effect)}", place, table)


def _continued(case: Case, ids: Prefix, length: int) -> dict[Prefix, float]:
    laws = {ids: 1.0}
    for _ in range(length - len(ids)):
        laws = {
            (*prefix, token): weight * p
            for prefix, weight in laws.items()
            for token, p in enumerate(case.target(prefix))
            if p > 0
        }
    return laws


def acceptance(case: Case, *, first_only: bool = False) -> Deviation:
    """Σ_x [P(x drafted and accepted) - min(p, q)]+ where it is largest: more than that is lossy at the first position."""
    return _worst(
        (
            _excess(case, prefix)
            for place in range(1 if first_only else case.num_drafts)
            for prefix in case.prefixes(place)
        ),
        "accepts no id more often than min(p, q)",
    )


def _excess(case: Case, prefix: Prefix) -> Deviation:
    accepted, overlap = _accepted(case, prefix), _overlap(case, prefix)
    effect = math.fsum(max(0.0, a - m) for a, m in zip(accepted, overlap, strict=True))
    token = max(range(len(accepted)), key=lambda each: accepted[each] - overlap[each])
    said = (
        f"accepts id {token} with probability {_short(accepted[token])} where min(p, q) is {_short(overlap[token])}; "
        f"{_short(effect)} in all should have been rejected"
    )
    hints = (("so little is rounding: the ratio, or a law, in half precision",) if effect < 1e-3 else ()) + (
        "more acceptance than the overlap of the two laws is lossy",
    )
    table = tuple(
        (f"id {token} drafted and accepted", m, a) for token, (m, a) in enumerate(zip(overlap, accepted, strict=True))
    )
    return Deviation(effect, said, _after(prefix), table, hints)


def accepted_too_rarely(case: Case) -> Deviation:
    """How much less than Σ min(p, q) is accepted: lawful, and slow."""
    return _worst((_shortfall(case, prefix) for prefix in case.prefixes(0)), "")


def _shortfall(case: Case, prefix: Prefix) -> Deviation:
    accepted, overlap = sum(_accepted(case, prefix)), sum(_overlap(case, prefix))
    return Deviation(max(0.0, overlap - accepted), f"accepts {_short(accepted)} where Σ min(p, q) is {_short(overlap)}")


def _accepted(case: Case, prefix: Prefix) -> Law:
    """P(x is drafted and accepted | all of `prefix` was), for each x."""
    place = len(prefix)
    reached = case.mass(lambda one: one.num_accepted >= place and one.drafted[:place] == prefix)
    return tuple(
        case.mass(lambda one, x=token: one.num_accepted > place and one.drafted[: place + 1] == (*prefix, x)) / reached  # type: ignore[misc]  # the loop's own x
        for token in range(case.instance.vocab_size)
    )


def _overlap(case: Case, prefix: Prefix) -> Law:
    return tuple(min(p, q) for p, q in zip(case.target(prefix), case.draft(prefix), strict=True))


def residual(case: Case) -> Deviation:
    """TV between the law of a replacement and [p - what was accepted]+ of its own row, times how often one is drawn."""
    return _worst(
        (_misplaced(case, prefix) for place in range(case.num_drafts) for prefix in case.prefixes(place)),
        "replaces rejected drafts by the law that is missing",
    )


def _misplaced(case: Case, prefix: Prefix) -> Deviation:
    place, vocab = len(prefix), case.instance.vocab_size
    reached = case.mass(lambda one: one.num_accepted >= place and one.drafted[:place] == prefix)
    replaced = [0.0] * vocab
    by_draft: dict[int, list[float]] = {}
    for outcome, weight in case.law.items():
        if outcome.num_accepted == place and outcome.drafted[:place] == prefix:
            replaced[outcome.emitted[-1]] += weight
            by_draft.setdefault(outcome.drafted[place], [0.0] * vocab)[outcome.emitted[-1]] += weight
    missing = [max(0.0, p - a) for p, a in zip(case.target(prefix), _accepted(case, prefix), strict=True)]
    if not sum(replaced):
        return Deviation(0.0, "")
    expected, actual = _norm(missing) if sum(missing) > 1e-15 else case.target(prefix), _norm(replaced)
    share = sum(replaced) / reached
    effect = share * _distance(expected, actual)
    table = tuple(
        (f"id {token} after a rejection", e, a) for token, (e, a) in enumerate(zip(expected, actual, strict=True))
    )
    said = f"replaces rejected drafts by another law, TV {_short(_distance(expected, actual))} in {share:.0%} of the steps that get there"
    return Deviation(effect, said, _after(prefix), table, _recognised(case, prefix, by_draft))


def _recognised(case: Case, prefix: Prefix, by_draft: dict[int, list[float]]) -> tuple[str, ...]:
    """The wrong laws that the replacement of every rejected id follows."""
    p, q = case.target(prefix), case.draft(prefix)
    after = {x: case.target((*prefix, x)) for x in by_draft}
    zero = (0.0,) * len(p)
    following = {x: case.draft((*prefix, x)) if (*prefix, x) in case.instance.draft else zero for x in by_draft}
    guesses: dict[str, Callable[[int], Law]] = {
        "it is the target's row itself: the draft was not subtracted": lambda _: p,
        "it is |p - q|: the difference was not clamped at 0": lambda _: tuple(
            abs(a - b) for a, b in zip(p, q, strict=True)
        ),
        "it is the draft's own row": lambda _: q,
        "it comes from the row after the rejected token": lambda x: _positive(after[x], following[x]),
        "it takes p from the row after the rejected token": lambda x: _positive(after[x], q),
        "it takes q from the row after the rejected token": lambda x: _positive(p, following[x]),
        "it is the target's row after the rejected token": lambda x: after[x],
    }
    if prefix:
        before = _positive(case.target(prefix[:-1]), case.draft(prefix[:-1]))
        guesses["it is the residual of the row before"] = lambda _: before
    return tuple(
        said
        for said, guess in guesses.items()
        if all(sum(guess(x)) > 0 and _distance(_norm(guess(x)), _norm(mass)) < 1e-6 for x, mass in by_draft.items())
    )


def bonus(case: Case) -> Deviation:
    """TV between the token after a wholly accepted block and the target's last row."""
    if not case.num_drafts:
        return Deviation(0.0, "")
    return _worst(
        (_unlike(case, drafted) for drafted in case.prefixes(case.num_drafts)), "draws the bonus from the target"
    )


def _unlike(case: Case, drafted: Prefix) -> Deviation:
    added = [0.0] * case.instance.vocab_size
    for outcome, weight in case.law.items():
        if outcome.drafted == drafted and outcome.num_accepted == case.num_drafts:
            added[outcome.emitted[-1]] += weight
    expected, actual = case.target(drafted), _norm(added)
    effect = _distance(expected, actual)
    hints = {
        "it is the draft's last row": case.draft(drafted[:-1]),
        "it is the target's row before the last": case.target(drafted[:-1]),
    }
    alike = tuple(said for said, law in hints.items() if _distance(law, actual) < 1e-6 < effect)
    table = tuple((f"id {token} as the bonus", e, a) for token, (e, a) in enumerate(zip(expected, actual, strict=True)))
    said = f"draws the token after an accepted block from another law, TV {_short(effect)}"
    return Deviation(effect, said, f"after {_ids(drafted)}, all accepted", table, alike)


# ---------------------------------------------------------------------------------------------- small things


def _norm(mass: Iterable[float]) -> Law:
    listed = tuple(mass)
    total = math.fsum(listed)
    return tuple(each / total for each in listed)


def _positive(first: Law, second: Law) -> Law:
    """[first - second]+, or the first where that is empty."""
    left = tuple(max(0.0, a - b) for a, b in zip(first, second, strict=True))
    return left if sum(left) > 1e-15 else first


def _distance(first: Law, second: Law) -> float:
    return math.fsum(abs(a - b) for a, b in zip(first, second, strict=True)) / 2


def _ids(ids: Prefix) -> str:
    return " ".join(str(token) for token in ids)


def _after(prefix: Prefix) -> str:
    return f"after {_ids(prefix)}" if prefix else "first position"


def _short(value: float) -> str:
    return f"{value:.3g}"
