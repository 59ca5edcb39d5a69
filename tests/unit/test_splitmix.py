"""SplitMix64 word for word, and how its uniforms are keyed."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.splitmix import SplitMix, _signed, mix64

WORD = 2**64 - 1


def mixed(state: int) -> int:
    """SplitMix64 in Python's integers, as [Steele2014] prints it."""
    word = (state + 0x9E3779B97F4A7C15) & WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def test_splitmix_gives_the_published_answers() -> None:
    """The first five outputs after the seed 1234567, and words of either sign."""
    states = torch.tensor(1234567) + torch.arange(5) * (0x9E3779B97F4A7C15 - 2**64)
    published = (
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    )  # fmt: skip
    assert [word & WORD for word in mix64(states).tolist()] == list(published)
    for word in (0, -1, 2**63 - 1, -(2**63)):
        assert mix64(torch.tensor([word])).item() & WORD == mixed(word & WORD)


@pytest.mark.parametrize("word", [0, 200, 2**63 - 1, 2**63, 2**63 + 5, WORD])
def test_a_constant_keeps_its_64_bits(word: int) -> None:
    """As the int64 that has them."""
    assert _signed(word) & WORD == word
    assert -(2**63) <= _signed(word) < 2**63


@pytest.mark.parametrize("stream", list(Stream))
def test_a_splitmix_uniform_is_the_mixer_over_who_and_what_for(stream: Stream) -> None:
    """Word for word: seed and sequence; stream, position and step in their bits; 53 bits. `TARGET` ignores the step."""
    seed, sequence, position, step, offset = 77, 3, 11, 5, 2
    choices = SplitMix.start(seed, torch.tensor([9, sequence])).moved(torch.tensor([position]), torch.tensor([step]))
    who = mixed(sequence ^ mixed(seed))
    counted = 0 if stream is Stream.TARGET else step
    what_for = mixed((((position + offset) << 8) + (counted << 32) + stream) ^ mixed(~seed & WORD))
    wanted = (mixed(who ^ what_for) >> 11) * 2.0**-53
    at = torch.tensor([0, offset])
    assert float(choices.uniform(stream, at)[1, 1]) == wanted
    by_row = torch.full((2, 2), int(stream))
    assert torch.equal(choices.uniform(by_row, at), choices.uniform(stream, at))
    assert torch.equal(choices.select(torch.tensor([1])).uniform(stream, at)[0], choices.uniform(stream, at)[1])
