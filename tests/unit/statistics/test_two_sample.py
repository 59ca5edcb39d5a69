"""Two arms: bets on signs that are fair for every law, and permutations that are exact."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specverify.errors import InternalError
from specverify.statistics.interval import clopper_pearson
from specverify.statistics.two_sample import bigram_gram, hamming_gram, mmd, sign_bets


@pytest.mark.parametrize("sizes", [np.ones(8), np.arange(8.0), np.array([1e-6, 5, 0, 2, 2, 1e6, 3, 1])])
def test_sign_bets_are_fair_by_enumeration(sizes):
    """Over all signs of any sizes the e-value averages 1, after every pair."""
    paths = [sign_bets(sizes * np.array(signs)) for signs in product((-1, 1), repeat=len(sizes))]
    np.testing.assert_allclose((10 ** np.array(paths)).mean(0), 1, rtol=1e-9)


def test_sign_bets_see_a_shift_either_way():
    """Half a standard deviation, in 400 pairs; nothing without it, and nothing to see without a difference."""
    noise = np.random.default_rng(1).normal(size=400)
    assert sign_bets(noise + 0.5)[-1] > 6
    assert sign_bets(noise - 0.5)[-1] > 6
    assert sign_bets(noise).max() < 2
    assert sign_bets(np.zeros(10)).tolist() == [0.0] * 10
    assert not len(sign_bets(np.empty(0)))


def test_a_difference_that_is_no_number_is_refused():
    """Infinite scores must be bounded before."""
    with pytest.raises(InternalError, match="finite"):
        sign_bets(np.array([1.0, np.inf]))


def texts(rng, law, number, length=8):
    """Texts of independent ids."""
    return rng.choice(len(law), (number, length), p=law).tolist()


LAW, OTHER = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
PROMPTS = np.tile(np.repeat(np.arange(4), 4), 2)
SECOND = np.repeat([False, True], 16)


@pytest.mark.parametrize("gram", [bigram_gram, hamming_gram])
def test_mmd_keeps_its_size_and_has_power(gram):
    """At most 10 % of healthy runs at 0.1; of another law nearly all."""
    rng, runs = np.random.default_rng(2), 100
    healthy = wrong = 0
    for run in range(runs):
        ours = texts(rng, LAW, 16)
        healthy += mmd(gram([*ours, *texts(rng, LAW, 16)]), SECOND, PROMPTS, resamples=99, seed=run).p_value <= 0.1
        wrong += mmd(gram([*ours, *texts(rng, OTHER, 16)]), SECOND, PROMPTS, resamples=99, seed=run).p_value <= 0.1
    assert clopper_pearson(healthy, runs, confidence=1 - 1e-4).low <= 0.1
    assert wrong > 0.8 * runs


def test_mmd_compares_texts_of_one_prompt_alone():
    """Prompts that differ among themselves are no difference of arms."""
    rng = np.random.default_rng(3)
    ours = [text for prompt in range(4) for text in texts(rng, np.roll(LAW, prompt), 4)]
    theirs = [text for prompt in range(4) for text in texts(rng, np.roll(LAW, prompt), 4)]
    outcome = mmd(bigram_gram([*ours, *theirs]), SECOND, PROMPTS)
    assert outcome.p_value > 0.01
    assert outcome.num_texts == 32


def test_kernels_count_what_texts_share():
    """Equal ids at equal places, and shares of ids and of pairs."""
    assert hamming_gram([[1, 2, 3], [1, 9, 3], [1]]).tolist() == [[3, 2, 1], [2, 3, 1], [1, 1, 1]]
    gram = bigram_gram([[1, 2], [1, 2], [3]])
    assert gram[0, 1] == pytest.approx(gram[0, 0])
    assert gram[0, 2] == 0
