"""The one seam of randomness: known answers, uniforms that can't be misread, and paths with exact weights."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from specverify.choices import Stream, inverse_cdf, philox
from specverify.choices.enumerate import Enumerate, every_exact_path, every_path
from specverify.choices.philox import Philox, philox4x32, uniform53
from specverify.choices.scripted import Scripted
from specverify.choices.splitmix import SplitMix
from specverify.errors import InternalError
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection

ONES = 0xFFFFFFFF
LARGEST_BELOW_1 = 1 - 2.0**-53


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The known-answer vectors of Random123 for Philox4x32-10."""
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == list(expected)


def test_philox_is_elementwise() -> None:
    """Many counters at once give what each gives alone."""
    counters = torch.arange(24).view(4, 6) * 0x12345678 & ONES
    keys = torch.arange(12).view(2, 6) * 0x0FEDCBA9 & ONES
    together = philox4x32(counters, keys)
    for column in range(6):
        assert together[:, column].tolist() == philox4x32(counters[:, column], keys[:, column]).tolist()


def _uniforms(count: int, *, seed: int = 0, stream: Stream = Stream.TARGET) -> torch.Tensor:
    zero = torch.tensor(0)
    return uniform53(torch.tensor(seed), torch.tensor(stream), zero, torch.arange(count), zero)


def test_uniforms_lie_in_the_half_open_unit_interval_and_have_53_bits() -> None:
    """Never 1, multiples of 2^-53, and not all multiples of 2^-52."""
    uniforms = _uniforms(20_000)
    assert float(uniforms.min()) >= 0
    assert float(uniforms.max()) < 1
    bits = uniforms * 2.0**53
    assert torch.equal(bits, bits.round())
    assert bool((bits % 2 == 1).any())


def test_uniforms_are_uniform_and_streams_independent() -> None:
    """Means, variances and correlations of all pairs of streams within five standard errors."""
    count = 20_000
    streams = torch.stack([_uniforms(count, stream=stream) for stream in Stream])
    assert float((streams.mean(1) - 0.5).abs().max()) < 5 * (1 / 12 / count) ** 0.5
    correlations = torch.corrcoef(streams) - torch.eye(len(Stream), dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / count**0.5


def test_every_coordinate_changes_the_uniform() -> None:
    """Seed (both halves), stream, sequence, position and step each enter the counter or the key."""
    base = [torch.tensor(5)] * 5
    seen = {float(uniform53(*base))}
    for coordinate, change in ((0, 1), (0, 1 << 40), (1, 1), (2, 1), (3, 1), (4, 1)):
        changed = list(base)
        changed[coordinate] = changed[coordinate] + change
        seen.add(float(uniform53(*changed)))
    assert len(seen) == 7


def test_negative_and_63_bit_seeds_are_seeds_too() -> None:
    """All 64 bits of an int64 count."""
    seeds = torch.tensor([-1, 1, 2**63 - 1, -(2**63), 0])
    zero = torch.tensor(0)
    assert len(set(uniform53(seeds, zero, zero, zero, zero).tolist())) == len(seeds)


def test_a_sequences_choices_do_not_depend_on_the_batch() -> None:
    """Alone, among others, reordered: the same uniforms; and `select` keeps each row's own."""
    seeds, sequences = torch.tensor([3, 9, 9, 27]), torch.tensor([0, 0, 1, 0])
    position, step = torch.tensor([4, 0, 7, 2]), torch.tensor([1, 0, 5, 2])
    batch = Philox(seeds, sequences, position, step)
    at = torch.arange(5)
    together = {stream: batch.uniform(stream, at) for stream in Stream}
    order = torch.tensor([2, 0, 3])
    for stream in Stream:
        assert torch.equal(batch.select(order).uniform(stream, at), together[stream][order])
        for row in range(4):
            alone = Philox(*(values[row : row + 1] for values in (seeds, sequences, position, step)), window=5)
            assert torch.equal(alone.uniform(stream, at)[0], together[stream][row])


@pytest.mark.parametrize("stream", [Stream.ACCEPT, Stream.JITTER])
def test_a_uniform_that_is_the_probability_itself_does_not_accept(stream: Stream) -> None:
    """Strictly below: the next larger probability accepts."""
    at, who = torch.arange(4), torch.arange(3)
    for choices in (Philox.start(who, who), SplitMix.start(7, who)):
        uniform = choices.uniform(stream, at)
        assert not choices.accept(uniform, stream=stream, at=at).any()
        assert choices.accept(torch.nextafter(uniform, torch.ones_like(uniform)), stream=stream, at=at).all()


def test_a_uniform_is_the_first_two_words_of_its_block() -> None:
    """Word for word: both halves of the seed, the stream, and 27 and 26 bits."""
    seed, stream, sequence, position, step = 5 + (7 << 32), int(Stream.BONUS), 3, 11, 2
    words = philox4x32(torch.tensor([position, sequence, step, stream]), torch.tensor([5, 7])).tolist()
    drawn = uniform53(*map(torch.tensor, (seed, stream, sequence, position, step)))
    assert float(drawn) == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53


def test_a_gpu_computes_the_uniforms_that_a_cpu_computes() -> None:
    """In torch, which the GPU runs, as in NumPy, which the CPU does: bit for bit, and coordinates broadcast."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 1), (1, 7), (5, 7), (1, 1), (5, 1))
    words = [torch.randint(-(2**63), 2**63 - 1, shape, generator=generator) for shape in shapes]
    found = philox._in_torch(words)
    assert found.shape == (5, 7)
    position, sequence, step, stream, seed = words
    assert torch.equal(found, uniform53(seed, stream, sequence, position, step))


def test_the_window_moves_along() -> None:
    """A tree's nodes have more places than a chain's; after a step they still do."""
    choices = Philox.start(torch.tensor([1]), torch.tensor([0]), window=12)
    moved = choices.moved(torch.tensor([2]), torch.tensor([1])).select(torch.tensor([0]))
    far = moved.uniform(Stream.DRAFT, torch.tensor([11]))
    assert float(far) == float(uniform53(*map(torch.tensor, (1, int(Stream.DRAFT), 0, 13, 1))))


def test_the_target_stream_ignores_the_step_and_the_others_do_not() -> None:
    """So sample-and-match emits what target-only sampling emits, and a position drafted again gets fresh uniforms."""
    row = torch.tensor([11])
    here = [Philox(row, row, torch.tensor([6]), torch.tensor([step])) for step in (0, 3)]
    at = torch.tensor([0, 1])
    for stream in Stream:
        same = torch.equal(here[0].uniform(stream, at), here[1].uniform(stream, at))
        assert same == (stream is Stream.TARGET)


def test_offsets_of_the_target_stream_are_positions() -> None:
    """Offset 2 at position 4 is offset 0 at position 6: a block draws what single steps draw."""
    row = torch.tensor([11])
    block = Philox(row, row, torch.tensor([4]), torch.tensor([0])).uniform(Stream.TARGET, torch.tensor([2]))
    single = Philox(row, row, torch.tensor([6]), torch.tensor([9])).uniform(Stream.TARGET, torch.tensor([0]))
    assert torch.equal(block, single)


def test_a_stream_for_each_row_picks_that_streams_uniforms() -> None:
    """Residual for one row and bonus for the other, as the chain rule asks."""
    rows = torch.tensor([1, 2])
    choices = Philox.start(rows, rows)
    at = torch.tensor([[1], [3]])
    mixed = choices.uniform(torch.tensor([[int(Stream.RESIDUAL)], [int(Stream.BONUS)]]), at)
    assert mixed[0, 0] == choices.uniform(Stream.RESIDUAL, torch.tensor([1]))[0, 0]
    assert mixed[1, 0] == choices.uniform(Stream.BONUS, torch.tensor([3]))[1, 0]
    both = torch.full((2, 2), int(Stream.DRAFT))
    offsets = torch.tensor([1, 3])
    assert torch.equal(choices.uniform(both, offsets), choices.uniform(Stream.DRAFT, offsets)), "offsets of every row"


def test_acceptance_is_strict() -> None:
    """Probability 0 is refused even at u = 0, and probability 1 is accepted even at the largest uniform."""
    at = torch.tensor([0, 1])
    prob = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert Scripted({Stream.ACCEPT: 0.0}).accept(prob, stream=Stream.ACCEPT, at=at).tolist() == [[False, True]]
    assert Scripted({Stream.ACCEPT: LARGEST_BELOW_1}).accept(prob, stream=Stream.ACCEPT, at=at).tolist() == [
        [False, True]
    ]


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.25, 0.5, 0.75, LARGEST_BELOW_1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_cdf_never_gives_an_impossible_id(uniform: float, dtype: torch.dtype) -> None:
    """Zeros in front, between and at the end; rows that are not normalised; tiny masses; any uniform."""
    laws = torch.tensor(
        [[0, 0, 3, 0, 1, 0], [0, 1e-30, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 7], [0, 0.1, 0.2, 0, 0.3, 0]],
        dtype=dtype,
    )
    drawn = inverse_cdf(laws, torch.full((len(laws),), uniform, dtype=torch.float64))
    assert bool((laws.gather(1, drawn[:, None]) > 0).all())


def test_the_inverse_cdf_gives_each_id_its_probability() -> None:
    """On a grid of uniforms the shares are the law; edges belong to the next id, u = 0 to the first possible one."""
    law = torch.tensor([0.0, 0.125, 0.5, 0.0, 0.375], dtype=torch.float64)
    grid = torch.arange(1024, dtype=torch.float64) / 1024
    drawn = inverse_cdf(law.expand(1024, -1), grid)
    assert (drawn.bincount(minlength=5) / 1024).tolist() == law.tolist()
    assert int(drawn[0]) == 1
    assert int(drawn[128]) == 2


def test_a_row_without_mass_is_an_internal_error() -> None:
    """It must never be answered with some id."""
    with pytest.raises(InternalError, match=r"^a token was to be drawn from a row without positive probability$"):
        inverse_cdf(torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------ every path


def _draws(laws: torch.Tensor, choices: Enumerate) -> torch.Tensor:
    batch = len(choices.records)
    at = torch.arange(laws.shape[0])
    return choices.draw(laws.expand(batch, -1, -1), stream=Stream.TARGET, at=at)


def test_every_path_is_taken_once_with_its_weight() -> None:
    """Two draws from laws of three possible ids: nine paths, weights that are products and add up to 1."""
    laws = torch.tensor([[0.2, 0.5, 0.3, 0.0], [0.0, 0.25, 0.25, 0.5]], dtype=torch.float64)
    found = {}
    for outcomes, weights in every_path(lambda choices: _draws(laws, choices)):
        for path, weight in zip(outcomes.tolist(), weights.tolist(), strict=True):
            assert tuple(path) not in found
            found[tuple(path)] = weight
    assert len(found) == 9
    assert sum(found.values()) == pytest.approx(1, abs=1e-15)
    for first, second in itertools.product(range(3), range(1, 4)):
        assert found[first, second] == pytest.approx(float(laws[0, first] * laws[1, second]), abs=1e-16)


def test_certain_answers_do_not_fork() -> None:
    """Acceptance at 0 and 1, and a law with one possible id, are one path of weight 1."""

    def program(choices: Enumerate) -> torch.Tensor:
        prob = torch.tensor([0.0, 1.0]).expand(len(choices.records), -1)
        accepted = choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(2))
        return torch.cat((accepted.long(), _draws(torch.tensor([[0.0, 4.0]]), choices)), 1)

    [(outcomes, weights)] = list(every_path(program))
    assert outcomes.tolist() == [[0, 1, 1]]
    assert weights.tolist() == [1.0]


def test_paths_may_ask_different_questions() -> None:
    """What is asked second depends on the first answer: 1 + 3 paths."""

    def program(choices: Enumerate) -> torch.Tensor:
        accepted = choices.accept(torch.full((len(choices.records), 1), 0.25), stream=Stream.ACCEPT, at=torch.arange(1))
        law = torch.where(accepted[..., None], torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 1.0, 2.0]))
        return torch.cat((accepted.long(), choices.draw(law, stream=Stream.RESIDUAL, at=torch.arange(1))), 1)

    paths = {
        tuple(path): weight
        for outcomes, weights in every_path(program)
        for path, weight in zip(outcomes.tolist(), weights.tolist(), strict=True)
    }
    assert paths == {(1, 0): 0.25, (0, 0): 0.1875, (0, 1): 0.1875, (0, 2): 0.375}


def test_each_start_has_paths_of_its_own() -> None:
    """Two starting points with different laws: the weights of each add up to 1, and none is mixed with the other."""
    laws = torch.tensor([[[0.25, 0.75, 0.0]], [[0.0, 0.5, 0.5]]], dtype=torch.float64)

    def program(choices: Enumerate) -> torch.Tensor:
        drawn = choices.draw(laws[choices.begun_at], stream=Stream.TARGET, at=torch.arange(1))
        return torch.stack((choices.begun_at, drawn[:, 0]), 1)

    paths = {
        tuple(path): weight
        for outcomes, weights in every_path(program, starts=2)
        for path, weight in zip(outcomes.tolist(), weights.tolist(), strict=True)
    }
    assert paths == {(0, 0): 0.25, (0, 1): 0.75, (1, 1): 0.5, (1, 2): 0.5}


def test_beyond_0_and_1_is_certain() -> None:
    """A rule that doesn't clamp its ratio asks with 1.5 or -0.5: one path, whose weight is 1."""

    def program(choices: Enumerate) -> torch.Tensor:
        prob = torch.tensor([1.5, -0.5]).expand(len(choices.records), -1)
        return choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(2)).long()

    [(outcomes, weights)] = every_path(program)
    assert (outcomes.tolist(), weights.tolist()) == ([[1, 0]], [1.0])


def test_fractions_are_weights_of_one_start() -> None:
    """A coin of 1/3 and one that is certain: two paths of one starting point, whose weights are 2/3 and 1/3."""

    def program(choices: Enumerate) -> torch.Tensor:
        prob = torch.tensor([1 / 3, 1.0], dtype=torch.float64).expand(len(choices.records), -1)
        return choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(2)).long()

    paths = [
        (path, weight)
        for outcomes, weights in every_exact_path(program)
        for path, weight in zip(outcomes.tolist(), weights, strict=True)
    ]
    assert sorted(paths) == [([0, 1], Fraction(2, 3)), ([1, 1], Fraction(1, 3))]


def test_hints_end_a_rows_questions() -> None:
    """After a rejection, and after a draw that differs from its guess, nothing forks; other rows go on."""

    def accepts(choices: Enumerate) -> torch.Tensor:
        prob = torch.full((len(choices.records), 3), 0.5, dtype=torch.float64)
        return choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(3), leading=True).long()

    def guesses(choices: Enumerate) -> torch.Tensor:
        laws = torch.tensor([0.5, 0.5]).expand(len(choices.records), 3, -1)
        guessed = torch.ones(len(laws), 2, dtype=torch.int64)  # the last place has no guess, and is asked
        return choices.draw(laws, stream=Stream.TARGET, at=torch.arange(3), guesses=guessed)

    expected = {(0, 0, 0): 0.5, (1, 0, 0): 0.25, (1, 1, 0): 0.125, (1, 1, 1): 0.125}
    for program in (accepts, guesses):
        found = {
            tuple(path): weight
            for outcomes, weights in every_path(program)
            for path, weight in zip(outcomes.tolist(), weights.tolist(), strict=True)
        }
        assert found == expected


def test_rows_that_ended_are_asked_nothing() -> None:
    """After `select` the other paths keep their weight, and the rows that go on keep theirs."""

    def program(choices: Enumerate) -> torch.Tensor:
        accepted = choices.accept(torch.full((len(choices.records), 1), 0.5), stream=Stream.ACCEPT, at=torch.arange(1))
        going_on = accepted[:, 0].nonzero()[:, 0]
        drawn = torch.full((len(accepted),), -1)
        if len(going_on):
            laws = torch.tensor([0.25, 0.75], dtype=torch.float64).expand(len(going_on), 1, -1)
            left = choices.select(going_on).moved(going_on, going_on)
            drawn[going_on] = left.draw(laws, stream=Stream.BONUS, at=torch.arange(1))[:, 0]
        return drawn

    law = torch.zeros(3, dtype=torch.float64)
    for outcomes, weights in every_path(program):
        law.index_add_(0, outcomes + 1, weights)
    assert law.tolist() == [0.5, 0.125, 0.375]


def test_a_path_is_in_a_selection_once() -> None:
    """Two rows of one path could get two answers to one question."""
    choices = Enumerate.start(torch.empty(2, 0, dtype=torch.int64), torch.arange(2))
    assert choices.select(torch.tensor([1])).live.tolist() == [1]
    assert choices.live.tolist() == [0, 1]
    with pytest.raises(
        InternalError, match=r"^a path of an enumeration was selected twice; .* places of one row instead$"
    ):
        choices.select(torch.tensor([1, 1]))


def test_each_race_forks_on_its_own() -> None:
    """Two races at one position: every pair of winners, with the product of the laws; not their coupling."""
    laws = torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]], dtype=torch.float64)

    def program(choices: Enumerate) -> torch.Tensor:
        rows, at = len(choices.records), torch.arange(1)
        return torch.cat([choices.race(law.expand(rows, 1, -1), at=at) for law in laws], 1)

    paths = {
        tuple(path): weight
        for outcomes, weights in every_path(program)
        for path, weight in zip(outcomes.tolist(), weights.tolist(), strict=True)
    }
    assert paths == {(0, 0): 0.125, (0, 1): 0.125, (1, 0): 0.375, (1, 1): 0.375}


def test_drawing_from_nothing_is_an_internal_error_only_where_it_is_asked() -> None:
    """A row without mass after the last question that counts is never drawn from."""
    laws = torch.tensor([[0.5, 0.5], [0.0, 0.0]], dtype=torch.float64)
    with pytest.raises(InternalError, match=r"^a token was to be drawn from a row without positive probability$"):
        list(every_path(lambda choices: _draws(laws, choices)))
    never = torch.tensor([[-1, -1]])

    def program(choices: Enumerate) -> torch.Tensor:
        rows = len(choices.records)
        guesses = never.expand(rows, -1)
        return choices.draw(laws.expand(rows, -1, -1), stream=Stream.TARGET, at=torch.arange(2), guesses=guesses)

    assert torch.cat([weights for _, weights in every_path(program)]).tolist() == [0.5, 0.5]


def test_too_many_paths_are_refused() -> None:
    """A program that can't be enumerated says so instead of filling the memory."""
    words = "^the program has more than 10 paths; make the vocabulary or the block smaller$"
    with pytest.raises(InternalError, match=words):
        list(every_path(lambda choices: _draws(torch.ones(4, 3), choices), max_paths=10))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [1, 2])
def test_the_first_token_of_chain_rejection_has_exactly_the_targets_law(seed: int, drafts: int) -> None:
    """Over every path of draft, accept, residual and bonus, on laws that differ from position to position."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.rand(2, drafts + 1, 4, generator=generator, dtype=torch.float64) ** 3
    draft[0, seed % 4] = 0
    target[0, (seed + 1) % 4] = 0
    target, draft = (laws / laws.sum(-1, keepdim=True) for laws in (target, draft))

    def program(choices: Enumerate) -> torch.Tensor:
        batch = len(choices.records)
        laws = draft[:drafts].expand(batch, -1, -1)
        ids = choices.draw(laws, stream=Stream.DRAFT, at=torch.arange(drafts))
        proposal = Proposal(ids, torch.full((batch,), drafts), laws)
        verification = chain_rejection(proposal, target.expand(batch, -1, -1), choices)
        return torch.where(verification.num_accepted_tokens > 0, ids[:, 0], verification.next_token_ids)

    law = torch.zeros(4, dtype=torch.float64)
    for outcomes, weights in every_path(program):
        law.index_add_(0, outcomes, weights)
    assert float((law - target[0]).abs().max()) < 1e-12
