"""The claims about a verifier: each is held on every instance, and fails with the smallest example that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specverify.errors import SubjectError
from specverify.qualify import measures
from specverify.qualify.instances import Instance, instances, point_mass_instances, same_laws, shrunk
from specverify.qualify.laws import Subject, Weights, exact_law, outcomes
from specverify.qualify.measures import Case, Deviation
from specverify.qualify.paths import FINEST, NotFollowed
from specverify.qualify.randomness import Drawn
from specverify.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLAIMS", "TOLERANCE", "Claim", "ClaimResult", "Exact", "Example"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""TV distance by which rounding may part two exact laws."""


_REPEATED = 8
"""Instances whose every path is taken twice, to see random numbers that aren't torch's."""


@dataclass(frozen=True)
class Example:
    """The smallest instance on which a claim fails, and what was seen there."""

    instance: Instance
    deviation: Deviation


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """What was found of one claim."""

    id: str
    claim: str
    verdict: Verdict
    summary: str
    method: str = "exact"
    """`exact`: every path was taken; `sampled`: a test with a bound on false alarms."""
    effect: float | None = None
    """The largest deviation seen, 0 for none."""
    num_instances: int = 0
    example: Example | None = None
    advice: str = ""


@dataclass
class Exact:
    """A function under test whose every path is taken; laws are kept, because several claims read the same."""

    subject: Subject
    seed: int = 0
    coarsest: int = FINEST
    """The fewest steps of a uniform that the function asked for on float64 laws."""
    _cases: dict[tuple[int, torch.dtype, bool], Case] = field(default_factory=dict)
    _kept: list[Instance] = field(default_factory=list)
    """What the keys above are ids of."""

    def __post_init__(self) -> None:
        *smaller, largest = instances(seed=self.seed)
        self.smaller, self.largest = tuple(smaller), (largest,)

    def case(self, instance: Instance, *, dtype: torch.dtype = torch.float64, independent: bool = False) -> Case:
        """The law of one row. Raises as `exact_law` does."""
        key = (id(instance), dtype, independent)
        if key not in self._cases:
            self._kept.append(instance)
            law = exact_law(self.subject, [instance], dtype=dtype, independent=independent)
            if dtype is torch.float64 and not independent:
                self.coarsest = min(self.coarsest, law.coarsest)
            self._cases[key] = Case.of(instance, law.weights, dtype, logits=self.subject.shape.logits)
        return self._cases[key]

    @property
    def tolerance(self) -> float:
        """Rounding of float64; of float32 where the function draws its uniforms there, whatever it is given."""
        return TOLERANCE[torch.float64 if self.coarsest == FINEST else torch.float32]

    def law_is_wrong(self) -> bool:
        """Whether a smaller instance shows it already."""
        return any(measures.lossless(self.case(one)).effect > self.tolerance for one in self.smaller)

    def instances(self) -> tuple[Instance, ...]:
        """The common ones, smallest first; the largest is left out where a smaller one shows a wrong law."""
        return self.smaller if self.law_is_wrong() else (*self.smaller, *self.largest)


Measure = Callable[[Instance], Deviation]


@dataclass(frozen=True)
class Claim:
    """One claim, and how it is looked at where every path can be taken."""

    id: str
    says: str
    look: Callable[[Exact, Claim], ClaimResult]
    advice: str
    needs_the_law: bool = False
    """It asks whether the law is still right in a special case, so a wrong law says nothing more here."""

    def result(self, exact: Exact) -> ClaimResult:
        """What every path shows; a function that breaks fails the claim on which it does. Raises `NotFollowed`."""
        return self.look(exact, self)

    def passed(self, summary: str, **more: object) -> ClaimResult:
        """It holds."""
        return replace(self._bare(Verdict.PASS, summary), **more)  # type: ignore[arg-type]  # fields by name

    def not_run(self, summary: str) -> ClaimResult:
        """It can't be asked of this function."""
        return self._bare(Verdict.NOT_RUN, summary)

    def failed(self, summary: str, **more: object) -> ClaimResult:
        """It doesn't hold."""
        return replace(self._bare(Verdict.FAIL, summary), advice=self.advice, **more)  # type: ignore[arg-type]  # fields by name

    def _bare(self, verdict: Verdict, summary: str) -> ClaimResult:
        return ClaimResult(id=self.id, claim=self.says, verdict=verdict, summary=summary)


def _held(claim: Claim, measure: Measure, on: Sequence[Instance], tolerance: float, holds: str) -> ClaimResult:
    """The claim on each instance, smallest first; the first failure is made smaller still."""
    deviations = [measure(instance) for instance in on]
    largest = max(deviation.effect for deviation in deviations)
    failing = [place for place, deviation in enumerate(deviations) if deviation.effect > tolerance]
    if not failing:
        return claim.passed(holds.format(len(on), largest), effect=largest, num_instances=len(on))
    first = failing[0]
    least = max(tolerance, deviations[first].effect / 2)
    smallest = shrunk(on[first], lambda one: measure(one).effect > least)
    deviation = measure(smallest)
    alike = [hint for hint in deviation.hints if all(hint in deviations[place].hints for place in failing)]
    return claim.failed(
        f"it {deviation.said}",
        effect=largest,
        num_instances=len(on),
        example=Example(smallest, replace(deviation, hints=tuple(alike))),
    )


def _law_claim(measure: Callable[[Case], Deviation], holds: str, exact: Exact, claim: Claim) -> ClaimResult:
    return _held(claim, lambda one: measure(exact.case(one)), exact.instances(), exact.tolerance, holds)


def _answers(exact: Exact, claim: Claim) -> ClaimResult:
    """Every path of every instance answers with ids that can be read, and the same ones again."""
    for place, instance in enumerate((*exact.smaller, *exact.largest)):
        if instance in exact.largest and exact.law_is_wrong():
            break
        try:
            law = exact.case(instance).law
            again = exact_law(exact.subject, [instance]).weights if place < _REPEATED else None
        except SubjectError as error:
            return claim.failed(str(error), example=Example(instance, Deviation(1.0, str(error))))
        if again is not None and {outcome: weight for (outcome,), weight in again.items()} != law:
            msg = "the same path ends otherwise when it is taken again, so it draws from elsewhere than torch"
            raise NotFollowed(msg)
    return claim.passed(f"every path of {len(exact.instances())} instances", num_instances=len(exact.instances()))


def _support(exact: Exact, claim: Claim) -> ClaimResult:
    """Nothing is allowed here: rounding makes no probability out of none."""
    result = _held(
        claim,
        lambda one: measures.support(exact.case(one)),
        exact.instances(),
        0.0,
        "never, on {} instances, at u = 0 too",
    )
    if result.example is None or result.example.deviation.effect > 1e-9:
        return result
    rates = [
        f"{measures.support(exact.case(result.example.instance, dtype=dtype)).effect:.0e} in {str(dtype).removeprefix('torch.')}"
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return replace(result, summary=f"{result.summary} in float64, {', '.join(rates)}")


def _streams(exact: Exact, claim: Claim) -> ClaimResult:
    """The law is wrong as it is, and right as it would be with uniforms of their own for each question."""

    def shared(instance: Instance) -> Deviation:
        as_it_is = measures.lossless(exact.case(instance))
        if as_it_is.effect <= exact.tolerance:
            return Deviation(0.0, "")
        apart = measures.lossless(exact.case(instance, independent=True)).effect
        effect = as_it_is.effect if apart <= exact.tolerance else 0.0
        said = f"uses a random number twice: TV {as_it_is.effect:.3g} as it is, 0 with a fresh one for each question"
        return replace(as_it_is, effect=effect, said=said)

    try:
        return _held(claim, shared, exact.instances(), exact.tolerance, "no law hangs on a number that is used twice")
    except SubjectError:
        return claim.passed("no law hangs on a number that is used twice")


def _acceptance(exact: Exact, claim: Claim) -> ClaimResult:
    """More than Σ min(p, q) fails; less is lawful, and said."""

    def excess(instance: Instance) -> Deviation:
        case = exact.case(instance)
        lawful = measures.lossless(case).effect <= exact.tolerance
        return measures.acceptance(case, first_only=lawful)

    result = _held(claim, excess, exact.instances(), exact.tolerance, "Σ min(p, q), on {} instances")
    slow = max(
        (measures.accepted_too_rarely(exact.case(one)) for one in exact.instances()), key=lambda each: each.effect
    )
    if result.verdict is Verdict.PASS and slow.effect > exact.tolerance:
        return replace(
            result, summary=f"never more than Σ min(p, q), and less where it could: it {slow.said}; lawful, and slow"
        )
    return result


def _residual(exact: Exact, claim: Claim) -> ClaimResult:
    """Only where the whole law is wrong: rules that carry weight along the block are right without this."""

    def wrong(instance: Instance) -> Deviation:
        case = exact.case(instance)
        if measures.lossless(case).effect <= exact.tolerance:
            return Deviation(0.0, "")
        return measures.residual(case)

    return _held(
        claim,
        wrong,
        exact.instances(),
        exact.tolerance,
        "what is missing to the target's row, on {} instances",
    )


def _point_masses(exact: Exact, claim: Claim) -> ClaimResult:
    return _on_special(exact, claim, point_mass_instances(seed=exact.seed), deterministic=True)


def _same_laws(exact: Exact, claim: Claim) -> ClaimResult:
    result = _on_special(exact, claim, same_laws(seed=exact.seed))
    if result.verdict is not Verdict.PASS:
        return result
    slow = max(
        (measures.accepted_too_rarely(exact.case(one)) for one in same_laws(seed=exact.seed)),
        key=lambda each: each.effect,
    )
    if slow.effect > exact.tolerance:
        return replace(result, summary=f"lawful, but drafts are rejected: it {slow.said}")
    return result


def _on_special(exact: Exact, claim: Claim, on: Sequence[Instance], *, deterministic: bool = False) -> ClaimResult:
    def distance(instance: Instance) -> Deviation:
        law = exact_law(exact.subject, [instance], deterministic=deterministic).weights
        return measures.lossless(Case.of(instance, law, torch.float64, logits=exact.subject.shape.logits))

    return _guarded(claim, partial(_held, claim, distance, on, exact.tolerance, "TV at most {1:.0e} on {0} instances"))


def _guarded(claim: Claim, looked: Callable[[], ClaimResult]) -> ClaimResult:
    """A function that breaks fails the claim."""
    try:
        return looked()
    except SubjectError as error:
        return claim.failed(str(error))


def _ragged(exact: Exact, claim: Claim) -> ClaimResult:
    """Fewer drafts than the longest row, and none."""
    instance = next(one for one in exact.instances() if one.vocab_size == 3 and one.num_drafts == 2)
    logits = exact.subject.shape.logits

    def look() -> ClaimResult:
        for lengths in ([2, 0], [0, 2], [1, 2]) if exact.subject.shape.batched else ([1], [0]):
            law = exact_law(exact.subject, [instance] * len(lengths), lengths=lengths).weights
            for place, length in enumerate(lengths):
                deviation = measures.lossless(
                    Case.of(instance, _row(law, place), torch.float64, logits=logits, num_drafts=length)
                )
                if deviation.effect > exact.tolerance:
                    said = f"with {lengths} drafts a row, row {place} {deviation.said}"
                    return claim.failed(said, effect=deviation.effect, example=Example(instance, deviation))
        return claim.passed("rows of 0, 1 and 2 drafts", num_instances=1)

    if not exact.subject.shape.ragged:
        return claim.not_run(f"the shape {exact.subject.shape.name} gives each call one number of drafts")
    return _guarded(claim, look)


def _row(law: Weights, place: int) -> Weights:
    """The law of one row of a call."""
    rows: Weights = {}
    for outcome, weight in law.items():
        rows[outcome[place],] = rows.get((outcome[place],), 0.0) + weight
    return rows


def _rows(exact: Exact, claim: Claim) -> ClaimResult:
    """The joint law of two different rows is the product of their own."""
    if not exact.subject.shape.batched:
        return claim.not_run(f"the shape {exact.subject.shape.name} takes one row")

    def look() -> ClaimResult:
        wide = [one for one in exact.instances() if one.num_drafts == 1 and one.vocab_size == 3][-2:]
        joint = exact_law(exact.subject, wide).weights
        alone = [exact.case(one).law for one in wide]
        product: Weights = {(a, b): alone[0][a] * alone[1][b] for a in alone[0] for b in alone[1]}
        pairs = {*joint, *product}
        effect = math.fsum(abs(joint.get(pair, 0.0) - product.get(pair, 0.0)) for pair in pairs) / 2
        if effect <= exact.tolerance:
            return claim.passed("two rows together have the product of their laws", effect=effect, num_instances=1)
        apart = max(
            measures.lossless(Case.of(one, _row(joint, place), torch.float64, logits=exact.subject.shape.logits)).effect
            for place, one in enumerate(wide)
        )
        how = (
            "each row's own law is right, so they share random numbers"
            if apart <= exact.tolerance
            else f"a row's own law is off by TV {apart:.3g}"
        )
        return claim.failed(f"two rows of a call depend on each other, TV {effect:.3g}: {how}", effect=effect)

    return _guarded(claim, look)


def _dtypes(exact: Exact, claim: Claim) -> ClaimResult:
    """float32 within rounding; bfloat16 within one rounding and one step of a uniform for each decision."""
    small = [one for one in exact.instances() if one.vocab_size == 3]
    measured = {}

    def look() -> ClaimResult:
        for dtype in (torch.float32, torch.bfloat16):
            deviations = [measures.lossless(exact.case(one, dtype=dtype)) for one in small]
            allowed = [TOLERANCE.get(dtype, (one.num_drafts + 1) / 2**7) for one in small]
            measured[dtype] = max(each.effect for each in deviations)
            name = str(dtype).removeprefix("torch.")
            for one, deviation, bound in zip(small, deviations, allowed, strict=True):
                if deviation.effect > bound:
                    said = f"in {name} it {deviation.said}, where {bound:.1e} is what rounding explains"
                    return claim.failed(said, effect=deviation.effect, example=Example(one, deviation))
        said = f"TV {measured[torch.float32]:.0e} in float32 (allowed 1e-06), {measured[torch.bfloat16]:.0e} in bfloat16 (allowed 2e-02)"
        return claim.passed(said, effect=measured[torch.bfloat16], num_instances=len(small))

    return _guarded(claim, look)


def _deterministic(exact: Exact, claim: Claim) -> ClaimResult:
    """The same seed twice, and other seeds."""
    return seeded(exact.subject, claim, exact.instances())


def seeded(subject: Subject, claim: Claim, on: Sequence[Instance]) -> ClaimResult:
    """Runs each instance twice from each of some seeds, with real random numbers."""

    def look() -> ClaimResult:
        for instance in on:
            for seed in range(4):
                first, second = (outcomes(subject, [instance], [instance.num_drafts], Drawn(seed)) for _ in range(2))
                if first != second:
                    said = f"seed {seed} gave {list(first[0].emitted)} and then {list(second[0].emitted)}"
                    return claim.failed(said, effect=1.0, example=Example(instance, Deviation(1.0, said)))
        return claim.passed(f"4 seeds on {len(on)} instances, each twice", num_instances=len(on))

    return _guarded(claim, look)


CLAIMS: tuple[Claim, ...] = (
    Claim("answers", "every call answers with accepted drafts and one more id of the vocabulary", _answers, "Look at empty residuals, at padding, and at what is returned for a rejected draft."),
    Claim("streams", "no random number decides two things", _streams, "Draw the acceptance, the residual and the bonus from uniforms of their own."),
    Claim("acceptance", "no draft is accepted more often than min(p, q)", _acceptance, "Accept where u < p(x) / q(x), with p and q of the drafted id's own row."),
    Claim("residual", "a rejected draft is replaced from norm [p - q]+ of its own row", _residual, "Look at the row's index, the clamp at 0, and the normalisation."),
    Claim("bonus", "the token after a wholly accepted block follows the target's last row", partial(_law_claim, measures.bonus, "the target's last row, on {} instances"), "Look at which row and whose law the bonus is drawn from."),
    Claim("support", "an id of target probability 0 is never emitted, at u = 0 too", _support, "Compare strictly, since torch.rand does return 0, and take what follows a draft from its own row."),
    Claim("lossless", "one step, continued by the target, has the target's law at every position", partial(_law_claim, measures.lossless, "TV at most {1:.0e} on {0} instances"), "The claims above say which part of the rule is wrong."),
    Claim("point-masses", "drafts that were not drawn (one-hot q, or None) are verified losslessly", _point_masses, "With q a point mass, accept with p(x) and replace from p without x.", needs_the_law=True),
    Claim("equal-laws", "where p = q the law is right, and nothing divides by an empty residual", _same_laws, "Fall back to p where [p - q]+ has no mass.", needs_the_law=True),
    Claim("rows", "rows of a call don't influence each other", _rows, "Look at shared uniforms, broadcasting, and indices across the batch.", needs_the_law=True),
    Claim("ragged", "rows may have fewer drafts than others, and none", _ragged, "Look at padding and at offsets of flattened rows.", needs_the_law=True),
    Claim("dtype", "the law holds in float32 and bfloat16 within what rounding explains", _dtypes, "Compute ratio, residual and uniforms in float32 or wider.", needs_the_law=True),
    Claim("deterministic", "the same seed gives the same ids", _deterministic, "Take all random numbers from the generator that was seeded."),
)  # fmt: skip
"""In the order in which a failure is blamed: the first that fails is the likeliest cause."""
