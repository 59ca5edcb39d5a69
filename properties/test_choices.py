"""choices: no two decisions share a uniform, a row's own depend on nothing else, and every path has its exact weight.

Distinct (seed, stream, sequence, position, step) give distinct uniforms, and nothing asked in a decode is asked twice;
what shares the batch changes nothing; `inverse_cdf` inverts exactly on every edge and never answers with an id of
probability 0; the paths of `Enumerate` weigh 1 together and are the law of what `Philox` draws.

Faults that it must catch: a coordinate that does not enter the counter, two that enter as a sum, half a seed, keys by the
place in the batch, a step that is not counted, edges that belong to the id before, no guard where u times the mass
rounds up to it, a cumulative sum in float32, a branch that is forgotten, a draft's uniform that also accepts it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from properties.strategies import LawPair, law_pairs, laws
from specverify.choices import Stream, inverse_cdf
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.philox import Philox, uniform53
from specverify.faults.rule import ChainParts
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from specverify.choices import Choices
    from specverify.verification import Rule

    Uniform = Callable[..., torch.Tensor]
    Invert = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LARGEST_BELOW_1 = 1 - 2.0**-53
SEARCH = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True, deadline=None)
WORD = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
SEEDS = st.one_of(st.integers(0, 3), st.integers(0, 3).map(lambda low: low << 32), st.integers(-(2**63), 2**63 - 1))
SMALL = st.integers(0, 2)
SMALL_SEEDS = st.sampled_from([0, 1, 1 << 32])
COORDINATES = st.one_of(
    st.lists(
        st.tuples(SMALL_SEEDS, st.sampled_from(Stream), SMALL, SMALL, SMALL), min_size=16, max_size=32, unique=True
    ),
    st.lists(st.tuples(SEEDS, st.sampled_from(Stream), WORD, WORD, WORD), min_size=2, max_size=16, unique=True),
)


# ---------------------------------------------------------------------------------------------------------- streams


def shares_nothing(uniform: Uniform, coordinates: list[tuple[int, ...]]) -> None:
    """Distinct coordinates, distinct uniforms: two of 53 bits agree by chance once in 10^13 examples."""
    columns = [torch.tensor(column, dtype=torch.int64) for column in zip(*coordinates, strict=True)]
    drawn = uniform(*columns).tolist()
    assert len(set(drawn)) == len(coordinates), "two coordinates share a uniform"


@given(coordinates=COORDINATES)
def test_distinct_coordinates_have_distinct_uniforms(coordinates: list[tuple[int, ...]]) -> None:
    """Small numbers, which collide when one is left out or two are added up, and all of 32 and 64 bits."""
    shares_nothing(uniform53, coordinates)


LESS: dict[str, Uniform] = {
    "stream-ignored": lambda seed, stream, *where: uniform53(seed, 0 * stream, *where),
    "sequence-ignored": lambda seed, stream, sequence, *where: uniform53(seed, stream, 0 * sequence, *where),
    "step-ignored": lambda *where: uniform53(*where[:4], 0 * where[4]),
    "sequence-plus-position": lambda seed, stream, sequence, position, step: uniform53(
        seed, stream, 0 * sequence, sequence + position, step
    ),
    "half-a-seed": lambda seed, *where: uniform53(seed & 0xFFFFFFFF, *where),
    "seed-plus-sequence": lambda seed, stream, sequence, *where: uniform53(
        seed + sequence, stream, 0 * sequence, *where
    ),
}


@pytest.mark.parametrize("name", LESS)
def test_distinctness_fails_on_its_faults(name: str) -> None:
    """Less than all five coordinates is seen."""
    with pytest.raises(AssertionError, match="share a uniform"):
        SEARCH(given(coordinates=COORDINATES)(lambda coordinates: shares_nothing(LESS[name], coordinates)))()


STEPS = st.lists(st.integers(1, 4), min_size=1, max_size=6)
"""Tokens that each step of a decode emits, of blocks of three drafts and one more."""


def asks_nothing_twice(start: Philox, steps: list[int]) -> None:
    """All that draft, acceptance, residual and bonus may ask in one decode; the target's stream is keyed by position."""
    asked: list[float] = []
    choices, position = start, 0
    for step, emitted in enumerate(steps):
        for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL, Stream.BONUS):
            asked += choices.uniform(stream, torch.arange(4))[0].tolist()
        position += emitted
        choices = choices.moved(torch.tensor([position]), torch.tensor([step + 1]))
    assert len(set(asked)) == len(asked), "one uniform decides twice"


@given(seed=SEEDS, sample=st.integers(0, 9), steps=STEPS)
def test_a_decode_never_asks_for_one_uniform_twice(seed: int, sample: int, steps: list[int]) -> None:
    """Positions that are drafted again get fresh uniforms."""
    asks_nothing_twice(Philox.start(torch.tensor([seed]), torch.tensor([sample])), steps)


class StepNotCounted(Philox):
    """A position that is drafted again meets the uniforms that rejected it."""

    def moved(self, position: torch.Tensor, step: torch.Tensor) -> Philox:
        """The position moves, the step does not."""
        return StepNotCounted(self.seed, self.sequence, position, 0 * step, self.window)


def test_freshness_fails_on_its_fault() -> None:
    """One step that emits less than its block is enough."""
    start = StepNotCounted(*torch.zeros(4, 1, dtype=torch.int64))
    asks_nothing_twice(start, [4, 4])
    with pytest.raises(AssertionError, match="decides twice"):
        asks_nothing_twice(start, [1, 1])


# ------------------------------------------------------------------------------------------------------------ rows

STANDING = st.lists(st.tuples(SEEDS, *[st.integers(0, 5)] * 3), min_size=1, max_size=4)
"""Seed, sequence, position and step of each row."""


def needs_its_row_alone(make: Callable[..., Philox], rows: list[tuple[int, ...]], order: list[int]) -> None:
    """In another order, with duplicates or rows left out, and alone: the same uniforms."""
    batch = make(*(torch.tensor(column) for column in zip(*rows, strict=True)))
    at = torch.arange(4)
    for stream in Stream:
        together = batch.uniform(stream, at)
        for chosen in (order, *([row] for row in range(len(rows)))):
            columns = zip(*(rows[row] for row in chosen), strict=True)
            for other in (batch.select(torch.tensor(chosen)), make(*map(torch.tensor, columns))):
                assert torch.equal(other.uniform(stream, at), together[chosen]), "a row's uniforms depend on its batch"


@given(rows=STANDING, data=st.data())
def test_a_rows_uniforms_do_not_depend_on_its_batch(rows: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Whatever shares it."""
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5), label="order")
    needs_its_row_alone(Philox, rows, order)


def by_place(seed: torch.Tensor, sequence: torch.Tensor, *where: torch.Tensor) -> Philox:
    """Rows are keyed by where they stand in the batch."""
    return Philox(seed, torch.arange(len(sequence)), *where)


def by_first_seed(seed: torch.Tensor, *where: torch.Tensor) -> Philox:
    """The batch has one seed."""
    return Philox(seed[:1].expand_as(seed), *where)


@pytest.mark.parametrize("make", [by_place, by_first_seed])
def test_independence_of_the_batch_fails_on_its_faults(make: Callable[..., Philox]) -> None:
    """Two rows that change places are enough."""
    with pytest.raises(AssertionError, match="depend on its batch"):
        needs_its_row_alone(make, [(1, 0, 0, 0), (2, 1, 0, 0)], [1, 0])


# ---------------------------------------------------------------------------------------------------- inverse CDF


@st.composite
def sixteenths(draw: st.DrawFn) -> list[int]:
    """Shares of 16: sums and edges are exact in every float."""
    cuts = sorted(draw(st.lists(st.integers(0, 16), min_size=2, max_size=5)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, 16], strict=True)]


def inverts_exactly(invert: Invert, shares: list[int]) -> None:
    """On every edge, just below it, and in between: the first id whose cumulative share is above u."""
    law = torch.tensor(shares, dtype=torch.float64) / 16
    edges = torch.tensor([*range(17)], dtype=torch.float64) / 16
    for uniform in (*edges[:-1].tolist(), *torch.nextafter(edges[1:], torch.zeros(1)).tolist(), 1 / 3):
        reached = [sum(shares[: token + 1]) > 16 * Fraction(uniform) for token in range(len(shares))]
        drawn = int(invert(law, torch.tensor(uniform, dtype=torch.float64)))
        assert drawn == reached.index(True), f"id {drawn} at u = {uniform} of {shares}"


def is_possible(invert: Invert, law: torch.Tensor, uniform: float) -> None:
    """An id of positive probability, whatever rounding does to the last edge."""
    drawn = int(invert(law, torch.tensor(uniform, dtype=torch.float64)))
    assert drawn < len(law), f"id {drawn} at u = {uniform}"
    assert law[drawn] > 0, f"id {drawn} at u = {uniform}"


UNIFORMS = st.one_of(st.sampled_from([0.0, LARGEST_BELOW_1, 0.5]), st.floats(0, 1, exclude_max=True))
ROWS = st.one_of(
    laws(5),
    st.lists(st.one_of(st.sampled_from([0.0, 5e-324]), st.floats(1e-300, 1e3)), min_size=1, max_size=5)
    .filter(any)
    .map(lambda row: torch.tensor(row, dtype=torch.float64)),
)


@given(shares=sixteenths())
def test_inverse_cdf_is_exact_on_every_edge(shares: list[int]) -> None:
    """An edge belongs to the next id of positive probability."""
    inverts_exactly(inverse_cdf, shares)


@given(law=ROWS, uniform=UNIFORMS)
@example(law=torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float64), uniform=LARGEST_BELOW_1)
@example(law=torch.tensor([0.0, 1e-300], dtype=torch.float64), uniform=0.0)
def test_inverse_cdf_never_draws_the_impossible(law: torch.Tensor, uniform: float) -> None:
    """Rows need not be normalised; tiny masses count, subnormal ones too, of which u times the mass may be the mass."""
    is_possible(inverse_cdf, law, uniform)


def unguarded(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The uniform times a subnormal mass may round up to the mass, and the id after the last is drawn."""
    cdf = law.double().cumsum(-1)
    return torch.searchsorted(cdf, uniform.unsqueeze(-1) * cdf[..., -1:], right=True).squeeze(-1)


def edges_to_the_left(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`cdf >= u` in place of `cdf > u`: at u = 0 the first id, possible or not."""
    cdf = law.double().cumsum(-1)
    return torch.searchsorted(cdf, uniform.unsqueeze(-1) * cdf[..., -1:]).squeeze(-1)


def single_precision(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """A uniform just below an edge rounds onto it."""
    return inverse_cdf(law, uniform.float().clamp(max=1 - 2**-24).double())


@pytest.mark.parametrize("invert", [edges_to_the_left, single_precision])
def test_exactness_fails_on_its_faults(invert: Invert) -> None:
    """Edges tell."""
    with pytest.raises(AssertionError, match="at u ="):
        SEARCH(given(shares=sixteenths())(lambda shares: inverts_exactly(invert, shares)))()


@pytest.mark.parametrize("invert", [edges_to_the_left, unguarded])
def test_possibility_fails_on_its_faults(invert: Invert) -> None:
    """The ends of the unit interval tell."""
    with pytest.raises(AssertionError, match="at u ="):
        SEARCH(given(law=ROWS, uniform=UNIFORMS)(lambda law, uniform: is_possible(invert, law, uniform)))()


# ----------------------------------------------------------------------------------------------------- every path


def step_of(rule: Rule, pair: LawPair) -> Callable[[Choices, int], torch.Tensor]:
    """One draft from the pair's draft law, verified: a number for (drafted, accepted, next token)."""

    def program(choices: Choices, batch: int) -> torch.Tensor:
        vocab_size = len(pair.target)
        draft_probs = pair.draft.expand(batch, 1, -1)
        drafted = choices.draw(draft_probs, stream=Stream.DRAFT, at=torch.arange(1))
        proposal = Proposal(drafted, torch.ones(batch, dtype=torch.int64), draft_probs)
        verification = rule(proposal, pair.target.expand(batch, 2, -1), choices)
        return (drafted[:, 0] * 2 + verification.num_accepted_tokens) * vocab_size + verification.next_token_ids

    return program


def enumerated(paths: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, float]:
    """The law over outcomes."""
    law: dict[int, float] = {}
    for outcomes, weights in paths:
        for outcome, weight in zip(outcomes.tolist(), weights.tolist(), strict=True):
            law[outcome] = law.get(outcome, 0.0) + weight
    return law


def agrees(law: dict[int, float], drawn: torch.Tensor) -> None:
    """Weights add up to 1, and each outcome is drawn as often: exact binomial tests that err once in 10^9."""
    assert sum(law.values()) == pytest.approx(1, abs=1e-12), f"the weights add up to {sum(law.values())}"
    seen = {outcome: int((drawn == outcome).sum()) for outcome in {*law, *drawn.tolist()}}
    for outcome, times in seen.items():
        expected = min(1.0, law.get(outcome, 0.0))
        chance = binomtest(times, len(drawn), expected).pvalue
        assert chance > 1e-9, f"outcome {outcome} of probability {expected} was drawn {times} times in {len(drawn)}"


def drawn_by_philox(program: Callable[[Choices, int], torch.Tensor], seed: int) -> torch.Tensor:
    """A thousand samples of one request."""
    samples = torch.arange(1_000)
    return program(Philox.start(torch.full_like(samples, seed), samples), len(samples))


@given(pair=law_pairs(3), seed=st.integers(0, 2**20))
def test_every_path_weighs_what_philox_draws(pair: LawPair, seed: int) -> None:
    """Draft, acceptance, residual and bonus of chain rejection, jointly."""
    program = step_of(chain_rejection, pair)
    agrees(
        enumerated(every_path(lambda choices: program(choices, len(choices.records)))), drawn_by_philox(program, seed)
    )


PAIR = LawPair(torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64), torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64))


def test_agreement_fails_on_a_branch_that_is_forgotten() -> None:
    """Rounds after the first are left out."""

    def program(choices: Enumerate) -> torch.Tensor:
        return step_of(chain_rejection, PAIR)(choices, len(choices.records))

    first_round = [next(every_path(program))]
    with pytest.raises(AssertionError, match="the weights add up to"):
        agrees(enumerated(first_round), drawn_by_philox(step_of(chain_rejection, PAIR), 0))


@pytest.mark.parametrize(
    "rule", [ChainParts(accept_stream=Stream.DRAFT), ChainParts(residual_stream=Stream.ACCEPT)], ids=["draft", "accept"]
)
def test_agreement_fails_on_a_uniform_that_decides_twice(rule: Rule) -> None:
    """`Enumerate` gives each question a fork of its own, so shared noise shows as another frequency."""
    program = step_of(rule, PAIR)
    law = enumerated(every_path(lambda choices: program(choices, len(choices.records))))
    with pytest.raises(AssertionError, match="was drawn"):
        agrees(law, drawn_by_philox(program, 0))
