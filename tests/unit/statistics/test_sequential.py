"""E-processes: paths by hand, proof, naming, and speed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specverify.errors import InternalError
from specverify.statistics.sequential import (
    bernoulli_bets,
    e_value_samples_needed,
    histogram_bets,
    likelihood_ratio_bets,
    mix,
    smallest_detectable_kl,
)


def test_likelihood_ratio_bets_average_over_eta() -> None:
    """Ratios 2 then 1/2 with η in {½, 1}: (1.5 + 2) / 2, then (1.5 · 0.75 + 1) / 2."""
    path = likelihood_ratio_bets(np.array([2.0, 0.5]), etas=(0.5, 1.0))
    assert 10**path == pytest.approx([1.75, 1.0625])


def test_a_ratio_of_one_neither_wins_nor_loses() -> None:
    """Where fault and claim agree the capital stays 1."""
    assert likelihood_ratio_bets(np.ones(5)) == pytest.approx(np.zeros(5))


def test_a_ratio_of_zero_ruins_only_the_boldest_bet() -> None:
    """η = 1 loses everything, the cautious bets go on: the fault may act only now and then."""
    path = likelihood_ratio_bets(np.array([0.0, 4.0]))
    assert 10**path == pytest.approx([(0.95 + 0.7) / 3, (0.95 * 1.15 + 0.7 * 1.9) / 3])


@pytest.mark.parametrize("impossible", [math.inf, math.nan])
def test_a_token_that_the_target_cannot_emit_is_proof_for_good(impossible: float) -> None:
    """Infinite from there on, also after ruin, also where the fault gives it nothing either (0/0)."""
    path = likelihood_ratio_bets(np.array([1.0, 0.0, impossible, 0.0, 1.0]), etas=(1.0,))
    assert path.tolist() == [0.0, -math.inf, math.inf, math.inf, math.inf]


def test_a_negative_ratio_is_a_bug() -> None:
    """Probabilities have no negative ratio."""
    with pytest.raises(InternalError, match="likelihood ratio"):
        likelihood_ratio_bets(np.array([-0.1]))


def test_histogram_bets_follow_the_shares_so_far() -> None:
    """Two bins, by hand: 2·½/1, then 2·1½/2, then 2·½/3."""
    path = histogram_bets(np.array([0.1, 0.2, 0.9]), bins=2)
    assert 10**path == pytest.approx([1, 1.5, 1.5 / 3])


def test_histogram_bets_equal_a_loop() -> None:
    """The ranks within bins are what a loop would count."""
    values = np.random.default_rng(5).random(300) ** 1.3
    counts, capital, expected = np.zeros(16), 0.0, []
    for t, value in enumerate(values):
        number = int(value * 16)
        capital += math.log10(16 * (counts[number] + 0.5) / (t + 8))
        counts[number] += 1
        expected.append(capital)
    assert histogram_bets(values) == pytest.approx(np.array(expected))


def test_mix_averages_and_names_what_contributes_most() -> None:
    """(100 · ¼ + 10 · ¾) and (1 · ¼ + 1000 · ¾)."""
    process = mix({"a": np.array([2.0, 0.0]), "b": np.array([1.0, 3.0])}, weights={"a": 1, "b": 3})
    assert 10**process.path == pytest.approx([32.5, 750.25])
    assert process.likeliest == "b"
    assert process.components == {"a": 0.0, "b": 3.0}
    assert process.log10_e == pytest.approx(math.log10(750.25))


def test_the_largest_and_the_first_crossing_are_those_of_the_path() -> None:
    """The largest so far is at least 0: one needs not bet at all."""
    process = mix({"a": np.array([1.0, 3.0, -2.0])})
    assert (process.log10_max, process.log10_e) == (3, -2)
    assert process.first_crossing(2) == 1
    assert process.first_crossing(3.5) is None
    assert mix({"a": np.array([-1.0])}).log10_max == 0


def test_proof_keeps_the_name_that_the_evidence_had_before() -> None:
    """An impossible token makes every bet infinite: the fault is named from the tokens before it."""
    ratio = np.array([3.0, 3.0, math.inf])
    process = mix({"wrong": likelihood_ratio_bets(1 / ratio), "right": likelihood_ratio_bets(ratio)})
    assert process.log10_e == math.inf
    assert process.likeliest == "right"
    assert all(math.isfinite(value) for value in process.components.values())


def test_no_observation_is_no_evidence() -> None:
    """log10 e = 0."""
    process = mix({"a": likelihood_ratio_bets(np.empty(0)), "b": histogram_bets(np.empty(0))})
    assert (process.log10_e, process.log10_max, process.first_crossing(1)) == (0, 0, None)


@pytest.mark.parametrize(
    ("paths", "weights"),
    [
        ({}, None),
        ({"a": np.zeros(2), "b": np.zeros(3)}, None),
        ({"a": np.zeros(2)}, {"a": -1.0}),
        ({"a": np.zeros(2)}, {"a": 0.0}),
    ],
)
def test_what_is_no_average_is_a_bug(paths: dict[str, np.ndarray], weights: dict[str, float] | None) -> None:
    """No component, unequal lengths, or weights that can't be normalised."""
    with pytest.raises(InternalError):
        mix(paths, weights)


def test_bernoulli_bets_by_hand() -> None:
    """One flag of probability ½ under a tilt of ln 3: 3/2 above, (1/3)/(2/3) below."""
    bets = bernoulli_bets(np.array([True]), np.array([0.5]), tilts=(math.log(3),))
    assert 10 ** bets.above[0] == pytest.approx(1.5)
    assert 10 ** bets.below[0] == pytest.approx(0.5)
    assert 10 ** bets.two_sided().path[0] == pytest.approx(1)


@pytest.mark.parametrize(("rate", "grows", "shrinks"), [(0.8, "above", "below"), (0.6, "below", "above")])
def test_bernoulli_bets_tell_the_two_sides_apart(rate: float, grows: str, shrinks: str) -> None:
    """Flags of probability 0.7 that come at 0.8 are proof of loss; at 0.6 they are a fault of the draft's state."""
    flags = np.random.default_rng(6).random(3000) < rate
    bets = bernoulli_bets(flags, np.full(3000, 0.7))
    assert getattr(bets, grows)[-1] > 6
    assert getattr(bets, shrinks)[-1] < 0
    assert bets.two_sided().likeliest == grows


def test_an_impossible_flag_is_proof() -> None:
    """Accepted with probability 0, or refused with probability 1."""
    bets = bernoulli_bets(np.array([True, False]), np.array([0.0, 1.0]))
    assert bets.above.tolist() == [math.inf, math.inf]
    assert bets.below[0] < 0
    assert bets.below[1] == math.inf
    with pytest.raises(InternalError):
        bernoulli_bets(np.array([True]), np.array([1.5]))


def test_samples_needed_is_log_over_growth() -> None:
    """Study: 2.4e-3 nats take 5,872 tokens to 1e-6 (at unrounded 2.353e-3), 3e-2 nats 463."""
    assert e_value_samples_needed(2.353e-3, 1e-6) == pytest.approx(5_872, rel=1e-3)
    assert e_value_samples_needed(0.01, math.exp(-5)) == pytest.approx(500, abs=1)
    needed = e_value_samples_needed(0.01, 1e-6, false_pass_rate=0.1)
    assert 1.5 < needed / e_value_samples_needed(0.01, 1e-6) < 2
    assert smallest_detectable_kl(needed, false_fail_rate=1e-6, false_pass_rate=0.1) == pytest.approx(0.01, rel=1e-3)
    assert smallest_detectable_kl(0, false_fail_rate=1e-6) == math.inf


def test_forty_components_of_200_000_tokens_are_mixed() -> None:
    """The whole library at the size of a nightly run."""
    rng = np.random.default_rng(7)
    ratio, values = rng.gamma(4, 0.25, 200_000), rng.random(200_000)
    bets = {f"fault {i}": likelihood_ratio_bets(ratio) for i in range(40)}
    process = mix(bets | {f"order {i}": histogram_bets(values) for i in range(3)})
    assert len(process.path) == 200_000


def test_what_is_nearly_as_likely_is_a_rival() -> None:
    """Within two decades of the likeliest, the nearest first, weights reckoned in (Note [Naming])."""
    ends = {"far": 2.9, "second": 4.5, "first": 5.0, "third": 3.1}
    process = mix({name: np.array([end]) for name, end in ends.items()})
    assert (process.likeliest, process.rivals) == ("first", ("second", "third"))
    assert mix({"a": np.array([3.0]), "b": np.array([0.9])}).rivals == ()
    assert mix({"a": np.array([3.0]), "b": np.array([0.9])}, weights={"a": 1, "b": 2}).rivals == ("b",)
