"""Two arms: bets on signs that are fair for every law, and permutations that are exact."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specverify.errors import InternalError
from specverify.statistics.interval import clopper_pearson
from specverify.statistics.two_sample import bigram_gram, bigrams, hamming_gram, mmd, sign_bets, witness_differences


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


def test_bets_on_a_learned_score_are_fair_by_enumeration():
    """Over all ways to swap the texts of six pairs, the evidence is 1 in the mean after each pair, whatever the texts."""
    rng = np.random.default_rng(4)
    pairs = [tuple(bigrams(text) for text in texts(rng, LAW, 2, length=5)) for _ in range(6)]
    paths = []
    for swaps in product((1, -1), repeat=6):
        ours, theirs = zip(*(pair[::swap] for pair, swap in zip(pairs, swaps, strict=True)), strict=True)
        paths.append(10 ** sign_bets(witness_differences(ours, theirs)))
    assert np.mean(paths, axis=0) == pytest.approx(np.ones(6))


def test_a_witness_is_the_difference_of_mean_kernels():
    """Σ k(X_s, ·) - k(Y_s, ·) over earlier pairs, at the one text less at the other, over the root of their number."""
    rng = np.random.default_rng(5)
    ours, theirs = ([bigrams(text) for text in texts(rng, law, 5, length=4)] for law in (LAW, OTHER))

    def kernel(one, other):
        return sum(times * other[each] for each, times in one.items())

    wanted = [
        sum(kernel(ours[s], z) - kernel(theirs[s], z) for s in range(t)) for t in range(5) for z in (ours[t], theirs[t])
    ]
    differences = [
        (one - other) / max(1, t) ** 0.5 for t, (one, other) in enumerate(zip(*[iter(wanted)] * 2, strict=True))
    ]
    assert witness_differences(ours, theirs).tolist() == pytest.approx(differences)


def test_a_witness_comes_to_see_another_law_and_nothing_else():
    """A proof within 400 pairs of short texts; none where the laws are the same."""
    rng = np.random.default_rng(6)
    ours, same, theirs = ([bigrams(text) for text in texts(rng, law, 400)] for law in (LAW, LAW, OTHER))
    assert sign_bets(witness_differences(ours, theirs)).max() > 8
    assert sign_bets(witness_differences(ours, same)).max() < 2


def test_bigrams_know_the_beginning_and_the_prompt():
    assert bigrams([1, 2, 1, 2]) == {("", None, 1): 1, ("", 1, 2): 2, ("", 2, 1): 1}
    assert not bigrams([1], prompt="a").keys() & bigrams([1], prompt="b").keys()
