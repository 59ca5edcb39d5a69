"""What can be said of a function whose randomness can't be followed: large sampled tables and tests with honest tails.

Narrow vocabulary, and a draft that is opposed to the target, so that a shared random number or a wrong row moves as much
mass as it can. Looks at 4,096 rows, then twice as many, and so on; all looks at all claims share one error budget.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from specverify.errors import SubjectError
from specverify.qualify.claims import CLAIMS, Claim, ClaimResult, Example, seeded
from specverify.qualify.instances import Instance, Prefix, instances, random_instance
from specverify.qualify.laws import Outcome, Subject, outcomes
from specverify.qualify.measures import Deviation
from specverify.qualify.randomness import Drawn, Edge, Randomness
from specverify.records import Verdict
from specverify.statistics.categorical import chi_square, smallest_detectable_tv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float

__all__ = ["FALSE_FAIL_RATE", "sampled_claims"]

FALSE_FAIL_RATE = 1e-6
"""Of a whole run, for a function that is right."""
_FALSE_PASS_RATE = 0.05
_WORTH_SEEING = {"lossless": 0.05, "acceptance": 0.05}
"""A TV distance that makes a claim INCONCLUSIVE where it would go unseen; the bonus is part of the lossless claim's law."""
_FIRST_LOOK, _LOOKS, _LOOKS_ONE_BY_ONE = 4_096, 5, 4
_VOCAB, _DRAFTS = 8, 2
_TESTS = 4
"""Claims that a p-value decides."""
_ROWS_A_CALL = 4_096


def opposed(seed: int) -> Instance:
    """A target over 8 ids after every prefix, and a draft that likes best what the target likes least."""
    one = random_instance(_VOCAB, _DRAFTS, seed=seed, denominator=64, name="draft opposed to target")
    draft = {}
    for prefix in one.draft:
        order = sorted(range(_VOCAB), key=lambda token, row=one.target[prefix]: row[token])  # type: ignore[misc]  # the loop's own row
        turned = dict(zip(order, sorted(one.target[prefix], reverse=True), strict=True))
        draft[prefix] = tuple(turned[token] for token in range(_VOCAB))
    return replace(one, draft=draft)


@dataclass(frozen=True)
class _Test:
    """One claim at one look."""

    p_value: float
    detectable: float
    said: str
    excess: bool = True


def sampled_claims(subject: Subject, *, seed: int) -> tuple[ClaimResult, ...]:
    """Every claim; those that need each path are not run, and say so."""
    by_id = {claim.id: claim for claim in CLAIMS}
    found = {"deterministic": seeded(subject, by_id["deterministic"], instances(seed=seed)[:8])}
    found["support"] = _support(subject, by_id["support"], seed)
    found |= _tested(subject, by_id, seed)
    return tuple(
        replace(found[claim.id], method="sampled")
        if claim.id in found
        else claim.not_run("needs every path, and the random numbers can't be followed")
        for claim in CLAIMS
    )


def _tested(subject: Subject, by_id: dict[str, Claim], seed: int) -> dict[str, ClaimResult]:
    """Draw, test, and draw as much again, until something fails or the last look."""
    instance = opposed(seed)
    looks = _LOOKS if subject.shape.batched else _LOOKS_ONE_BY_ONE
    allowed = FALSE_FAIL_RATE / (looks * _TESTS)
    rows, table = _drawn(subject, instance, seed), _Table(instance, allowed, np.random.default_rng(seed))
    tests: dict[str, _Test] = {}
    try:
        for look in range(looks):
            while len(table.seen) < _FIRST_LOOK * 2**look:
                table.add(next(rows))
            tests = table.tests()
            if any(test.excess and test.p_value <= allowed for test in tests.values()):
                break
    except SubjectError as error:
        return {"answers": by_id["answers"].failed(str(error), example=Example(instance, Deviation(1.0, str(error))))}
    found = {name: _judged(by_id[name], test, allowed, len(table.seen)) for name, test in tests.items()}
    return found | {"answers": by_id["answers"].passed(f"{len(table.seen):,} rows")}


def _judged(claim: Claim, test: _Test, allowed: float, num_rows: int) -> ClaimResult:
    counted = f"{num_rows:,} rows, p = {test.p_value:.1e}, fails below {allowed:.1e}"
    if test.p_value <= allowed and test.excess:
        return claim.failed(f"it {test.said} ({counted})", effect=1.0 - test.p_value)
    if test.p_value <= allowed:
        return claim.passed(f"never more, and less: it {test.said}; lawful, and slow ({counted})")
    if test.detectable > _WORTH_SEEING.get(claim.id, 1.0):
        result = claim.passed(f"too few rows: a TV distance of {test.detectable:.3f} could go unseen ({counted})")
        return replace(result, verdict=Verdict.INCONCLUSIVE)
    return claim.passed(f"{counted}; a TV distance of {test.detectable:.3f} would be seen")


def _drawn(subject: Subject, instance: Instance, seed: int) -> Iterator[list[Outcome]]:
    """Batches of rows without end, each from a seed of its own."""
    batch = seed * 1_000_003
    many = [instance] * _ROWS_A_CALL
    while True:
        batch += 1
        yield list(outcomes(subject, many, [_DRAFTS] * len(many), Drawn(batch)))


@dataclass
class _Table:
    """What was drawn so far, and each block once more, continued by the target."""

    instance: Instance
    allowed: float
    rng: np.random.Generator
    seen: list[Outcome] = field(default_factory=list)
    completed: Counter[Prefix] = field(default_factory=Counter)

    def add(self, rows: list[Outcome]) -> None:
        """More rows."""
        self.seen += rows
        self.completed.update(_completed(self.instance, outcome.emitted, self.rng) for outcome in rows)

    def tests(self) -> dict[str, _Test]:
        """Each claim on all rows."""
        return {"lossless": self._lossless(), "acceptance": self._acceptance(), "bonus": self._bonus()}

    def _lossless(self) -> _Test:
        joint = list(product(range(_VOCAB), repeat=_DRAFTS + 1))
        law = np.array([_probability(self.instance, ids) for ids in joint])
        counts = np.array([self.completed[ids] for ids in joint])
        distance = np.abs(counts / counts.sum() - law).sum() / 2
        said = f"emits another law than the target's, TV about {distance:.3f}"
        return _Test(chi_square(counts, law).p_value, self._detectable(law, len(self.seen)), said)

    def _acceptance(self) -> _Test:
        laws = zip(self.instance.target[()], self.instance.draft[()], strict=True)
        overlap = float(sum(min(p, q) for p, q in laws))
        accepted, total = sum(outcome.num_accepted > 0 for outcome in self.seen), len(self.seen)
        law = np.array([overlap, 1 - overlap])
        said = f"accepts {accepted / total:.3f} of the first drafts where Σ min(p, q) is {overlap:.3f}"
        p_value = chi_square(np.array([accepted, total - accepted]), law).p_value
        return _Test(p_value, self._detectable(law, total), said, excess=accepted / total > overlap)

    def _bonus(self) -> _Test:
        """Each wholly accepted block has its own last row: one test a block, the smallest p-value times their number."""
        added: dict[Prefix, list[int]] = {}
        for outcome in self.seen:
            if outcome.num_accepted == _DRAFTS:
                added.setdefault(outcome.drafted, [0] * _VOCAB)[outcome.emitted[-1]] += 1
        laws = {drafted: np.array([float(each) for each in self.instance.target[drafted]]) for drafted in added}
        tests = [(chi_square(np.array(counts), laws[drafted]).p_value, drafted) for drafted, counts in added.items()]
        if not tests:
            return _Test(1.0, 1.0, "accepted no whole block")
        p_value, drafted = min(tests)
        said = f"draws the bonus after {drafted} from another law than the target's last row"
        most = max(added, key=lambda ids: sum(added[ids]))
        detectable = self._detectable(laws[most], sum(added[most]), tests=len(tests))
        return _Test(min(1.0, p_value * len(tests)), detectable, said)

    def _detectable(self, law: Float[np.ndarray, " cells"], num_rows: int, *, tests: int = 1) -> float:
        rate = self.allowed / tests
        return smallest_detectable_tv(law, num_rows, false_fail_rate=rate, false_pass_rate=_FALSE_PASS_RATE)


def _support(subject: Subject, claim: Claim, seed: int) -> ClaimResult:
    """Drawn, and with every uniform at 0, on laws with zeros."""
    holes = [one for one in instances(seed=seed) if any(not each for each in one.target[()])]
    for instance in holes:
        tried: list[Randomness] = [Edge(), *(Drawn(seed + number) for number in range(100))]
        for randomness in tried:
            try:
                (outcome,) = outcomes(subject, [instance], [instance.num_drafts], randomness)
            except SubjectError as error:
                return claim.failed(str(error), example=Example(instance, Deviation(1.0, str(error))))
            if _probability(instance, outcome.emitted) == 0:
                at = "with every uniform at 0 " if isinstance(randomness, Edge) else ""
                said = f"{at}emitted {list(outcome.emitted)}, which the target can't"
                return claim.failed(f"it {said}", effect=1.0, example=Example(instance, Deviation(1.0, said)))
    return claim.passed(f"never in {101 * len(holes)} calls, nor with torch's uniforms at 0", num_instances=len(holes))


def _probability(instance: Instance, ids: Prefix) -> float:
    chance = Fraction(1)
    for place, token in enumerate(ids):
        chance *= instance.target[ids[:place]][token]
    return float(chance)


def _completed(instance: Instance, ids: Prefix, rng: np.random.Generator) -> Prefix:
    """The emitted ids, continued by the target."""
    while len(ids) <= _DRAFTS:
        cdf = np.cumsum([float(each) for each in instance.target[ids]])
        ids = (*ids, int(np.searchsorted(cdf, rng.random() * cdf[-1], side="right")))
    return ids
