"""Every path of a program is taken once, with its exact weight; what is certain or unasked does not fork."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_exact_path, every_path
from specverify.errors import InternalError
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection


def _draws(laws: torch.Tensor, choices: Enumerate) -> torch.Tensor:
    batch = len(choices.records)
    at = torch.arange(laws.shape[0])
    return choices.draw(laws.expand(batch, -1, -1), stream=Stream.TARGET, at=at)


def paths_of(rounds):
    """Outcomes and weight of each path of `every_path` or `every_exact_path`, one after the other."""
    return [
        (tuple(path) if isinstance(path, list) else path, weight)
        for outcomes, weights in rounds
        for path, weight in zip(outcomes.tolist(), getattr(weights, "tolist", lambda its=weights: its)(), strict=True)
    ]


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

    paths = dict(paths_of(every_path(program)))
    assert paths == {(1, 0): 0.25, (0, 0): 0.1875, (0, 1): 0.1875, (0, 2): 0.375}


def test_each_start_has_paths_of_its_own() -> None:
    """Two starting points with different laws: the weights of each add up to 1, and none is mixed with the other."""
    laws = torch.tensor([[[0.25, 0.75, 0.0]], [[0.0, 0.5, 0.5]]], dtype=torch.float64)

    def program(choices: Enumerate) -> torch.Tensor:
        drawn = choices.draw(laws[choices.begun_at], stream=Stream.TARGET, at=torch.arange(1))
        return torch.stack((choices.begun_at, drawn[:, 0]), 1)

    paths = dict(paths_of(every_path(program, starts=2)))
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

    paths = paths_of(every_exact_path(program))
    assert sorted(paths) == [((0, 1), Fraction(2, 3)), ((1, 1), Fraction(1, 3))]


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
        found = dict(paths_of(every_path(program)))
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

    paths = dict(paths_of(every_path(program)))
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


def test_more_questions_than_a_record_has_room_for() -> None:
    """Six coins, though room is made for four at a time: each of 64 paths once."""

    def program(choices: Enumerate) -> torch.Tensor:
        prob = torch.tensor([0.5, 0.25, 0.5, 0.125, 0.5, 0.75]).expand(len(choices.records), -1)
        return choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(6)).long()

    paths = paths_of(every_path(program))
    assert len(paths) == len(dict(paths)) == 64
    assert dict(paths)[1, 1, 0, 1, 0, 1] == 0.5 * 0.25 * 0.5 * 0.125 * 0.5 * 0.75
    assert sum(dict(paths).values()) == 1.0


def test_how_often_what_is_certain_is_asked_may_depend_on_the_batch() -> None:
    """It is asked once in a batch of one and twice in a batch of two; the draw that forks is answered all the same."""

    def program(choices: Enumerate) -> torch.Tensor:
        batch = len(choices.records)
        for _ in range(batch):
            choices.accept(torch.ones(batch, 1), stream=Stream.ACCEPT, at=torch.arange(1))
        return _draws(torch.tensor([[0.25, 0.25, 0.5]]), choices)[:, 0]

    paths = paths_of(every_path(program))
    assert sorted(paths) == [(0, 0.25), (1, 0.25), (2, 0.5)]


def test_fractions_where_hints_end_the_questions() -> None:
    """The second coin is tossed after a head alone: heads twice, head and tail, tail."""

    def program(choices: Enumerate) -> torch.Tensor:
        prob = torch.tensor([1 / 3, 1 / 4], dtype=torch.float64).expand(len(choices.records), -1)
        return choices.accept(prob, stream=Stream.ACCEPT, at=torch.arange(2), leading=True).long()

    paths = paths_of(every_exact_path(program))
    assert sorted(paths) == [((0, 0), Fraction(2, 3)), ((1, 0), Fraction(1, 4)), ((1, 1), Fraction(1, 12))]


def test_the_most_paths_are_counted_over_all_rounds() -> None:
    """Two draws of three ids are nine paths: nine are allowed, and eight are too few though no round has more than four."""

    def program(choices: Enumerate) -> torch.Tensor:
        return _draws(torch.full((2, 3), 1 / 3), choices)

    assert sum(len(weights) for _, weights in every_path(program, max_paths=9)) == 9
    with pytest.raises(InternalError, match="more than 8 paths"):
        list(every_path(program, max_paths=8))


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
