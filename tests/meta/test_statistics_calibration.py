"""The statistics under test themselves: size as promised, honest tails, power as designed, pitfalls.

Every simulation has a fixed seed. A rate that was seen is held against the promise by its exact interval at 1 - 1e-4.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import optimize, stats

from specverify.statistics.acceptance import tokens_per_step
from specverify.statistics.budget import e_threshold, holm
from specverify.statistics.categorical import _tail_bound, chi_square, samples_needed_tv
from specverify.statistics.interval import clopper_pearson, cluster_interval, paired_ratio_interval
from specverify.statistics.sequential import (
    bernoulli_bets,
    e_value_samples_needed,
    histogram_bets,
    likelihood_ratio_bets,
    mix,
)
from specverify.statistics.uniformity import (
    chi_square_uniform,
    kolmogorov_distance_bound,
    kolmogorov_smirnov,
    samples_needed_kolmogorov,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

quick = pytest.mark.quick
nightly = pytest.mark.nightly


def assert_at_most(num_hits: int, num_runs: int, rate: float) -> None:
    """The rate that was seen doesn't contradict a true rate of at most `rate`."""
    assert clopper_pearson(num_hits, num_runs, confidence=1 - 1e-4).low <= rate, f"{num_hits}/{num_runs} over {rate}"


def assert_at_least(num_hits: int, num_runs: int, rate: float) -> None:
    """The rate that was seen doesn't contradict a true rate of at least `rate`."""
    assert clopper_pearson(num_hits, num_runs, confidence=1 - 1e-4).high >= rate, f"{num_hits}/{num_runs} under {rate}"


def zipf(size: int) -> Floats:
    """A law with a long tail."""
    weights = 1 / np.arange(1, size + 1)
    return weights / weights.sum()


# ------------------------------------------------------------------------------------------------ size under the null


@quick
def test_ks_rejects_healthy_streams_at_its_rate() -> None:
    """Exact, so not only at most: 5 % of 1,500 runs."""
    rng = np.random.default_rng(100)
    rejected = sum(kolmogorov_smirnov(rng.random(40)).p_value <= 0.05 for _ in range(1500))
    assert_at_most(rejected, 1500, 0.05)
    assert_at_least(rejected, 1500, 0.05)


def compositions(total: int, cells: int) -> Iterator[tuple[int, ...]]:
    """All counts of so many cells with this total."""
    for bars in itertools.combinations(range(total + cells - 1), cells - 1):
        edges = (-1, *bars, total + cells - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(edges))


def greatest_excess(p_values: Floats, weights: Floats, *, below: float = 1.0) -> float:
    """The greatest P(p-value <= t) / t over all levels t that occur in (1e-12, below]: 1 or less is honest."""
    levels, group = np.unique(p_values, return_inverse=True)
    reached = np.cumsum(np.bincount(group, weights=weights))
    inside = (levels > 1e-12) & (levels <= below)
    return float((reached[inside] / levels[inside]).max())


@quick
@pytest.mark.parametrize(("law", "num_samples"), [([0.3, 0.7], 100), ([0.1, 0.9], 150), ([0.2, 0.3, 0.5], 35)])
def test_chi_square_is_honest_at_every_level_by_exact_enumeration(law: list[float], num_samples: int) -> None:
    """Over *all* outcomes P(p <= t) <= t, down to 1e-12. Pearson with its limit law breaks that 4-fold and more."""
    probs = np.array(law)
    outcomes = np.array(list(compositions(num_samples, len(law))))
    weights = stats.multinomial.pmf(outcomes, num_samples, probs)
    honest = np.array([chi_square(counts, probs).p_value for counts in outcomes])
    assert greatest_excess(honest, weights) <= 1 + 1e-9
    expected = num_samples * probs
    pearson = stats.chi2.sf(((outcomes - expected) ** 2 / expected).sum(1), len(law) - 1)
    assert greatest_excess(pearson, weights, below=1e-3) > 4


def tail_by_importance_sampling(
    law: Floats, num_samples: int, threshold: Floats, statistic: str, *, spread: float, seed: int
) -> Floats:
    """P(statistic >= each threshold) under a multinomial law, from counts of wider, Dirichlet-multinomial laws.

    The counts come from laws that scatter around `law` so that the statistic averages about `spread` times its mean.
    """
    rng = np.random.default_rng(seed)
    concentration = num_samples / (spread - 1) * law
    laws = rng.dirichlet(concentration, 100_000)
    counts = rng.multinomial(num_samples, laws)
    weights = np.exp(
        stats.multinomial.logpmf(counts, num_samples, law)
        - stats.dirichlet_multinomial.logpmf(counts, concentration, num_samples)
    )
    expected = num_samples * law
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = {"pearson": (counts - expected) ** 2 / expected, "g": 2 * counts * np.log(counts / expected)}[statistic]
    reached = np.nan_to_num(terms).sum(1)
    return np.array([weights[reached >= least].sum() / len(weights) for least in threshold])


@quick
@pytest.mark.parametrize(("cells", "num_samples", "decades"), [(16, 160, (5, 7, 9)), (30, 3_000, (5, 7, 9))])
def test_chi_square_is_honest_far_out_by_importance_sampling(
    cells: int, num_samples: int, decades: tuple[int, ...]
) -> None:
    """Where it says 1e-5, 1e-7 and 1e-9 the true tail is 3 to 100 times smaller (seen: 20 to 30)."""
    law = np.full(cells, 1 / cells)
    expected = num_samples * law

    def excess(statistic: float, decade: int) -> float:
        return np.log10(_tail_bound(statistic, cells - 1, expected, num_samples)) + decade

    critical = [optimize.brentq(excess, cells, 20 * cells, args=(decade,)) for decade in decades]
    spread = critical[1] / (cells - 1)
    tails = tail_by_importance_sampling(law, num_samples, np.array(critical), "g", spread=spread, seed=101)
    ratios = tails / 10.0 ** -np.array(decades)
    assert (ratios < 1 / 3).all(), ratios
    assert (ratios > 1 / 100).all(), ratios


@quick
def test_the_limit_law_is_not_honest_at_1e_7() -> None:
    """Why it isn't used: over 40 cells that expect 5 and more Pearson's tail at its "1e-7" is over 3 times that."""
    law = np.concatenate((np.full(38, 5 / 200), [0.025, 0.025]))
    critical = np.array([stats.chi2.isf(1e-7, 39)])
    (tail,) = tail_by_importance_sampling(law, 200, critical, "pearson", spread=critical[0] / 39, seed=102)
    assert tail > 3e-7


@quick
def test_e_processes_rarely_reach_20_on_healthy_streams() -> None:
    """Ville: in at most 5 % of the runs, at *any* time, for each kind of bet and their average."""
    rng = np.random.default_rng(103)
    p, q = zipf(20), rng.dirichlet(np.ones(20))
    runs, ever = 500, np.zeros(4, dtype=int)
    for _ in range(runs):
        tokens = rng.choice(20, 300, p=p)
        library = likelihood_ratio_bets(q[tokens] / p[tokens])
        histogram = histogram_bets(rng.random(300))
        flags = rng.random(300) < 0.7
        bernoulli = bernoulli_bets(flags, np.full(300, 0.7))
        mixed = mix({"library": library, "histogram": histogram, "above": bernoulli.above, "below": bernoulli.below})
        paths = (library, histogram, bernoulli.two_sided().path, mixed.path)
        ever += [path.max() >= np.log10(20) for path in paths]
    for hits in ever.tolist():
        assert_at_most(hits, runs, 0.05)


@quick
def test_one_sided_bernoulli_bets_hold_for_every_smaller_probability() -> None:
    """`above` stays fair where less is accepted than was said: only more is proof."""
    rng = np.random.default_rng(104)
    hits = sum(bernoulli_bets(rng.random(400) < 0.6, np.full(400, 0.65)).above.max() >= 1 for _ in range(500))
    assert_at_most(hits, 500, 0.1)


@quick
def test_the_budget_of_a_run_holds() -> None:
    """Two e-processes at rate/2 and five dependent p-values at rate/2 by Holm: at most `rate` of healthy runs fail."""
    rng, rate, runs, failed = np.random.default_rng(105), 0.2, 400, 0
    for _ in range(runs):
        values = rng.random((2, 200))
        least = e_threshold(rate / 2, 2)
        by_e = any(mix({"histogram": histogram_bets(each)}).log10_max >= least for each in values)
        tests = [kolmogorov_smirnov(each).p_value for each in (values[0], values[1], values.ravel(), 1 - values[0])]
        levels = holm([*tests, chi_square_uniform(values[0]).p_value], rate / 2)
        failed += by_e or any(level.rejected for level in levels)
    assert_at_most(failed, runs, rate)


# ------------------------------------------------------------------------------------------------ power as designed


@quick
@pytest.mark.parametrize("rate", [1e-3, 5e-7])
def test_ks_needs_about_the_samples_that_it_says(rate: float) -> None:
    """At `samples_needed` it misses a distance of 0.1 in at most 10 %; at half of that it misses it in more."""
    rng, runs = np.random.default_rng(106), 300
    needed = samples_needed_kolmogorov(0.1, false_fail_rate=rate, false_pass_rate=0.1)

    def caught(num_samples: int) -> int:
        hits = 0
        for _ in range(runs):
            low = rng.random(num_samples) < 0.6  # the CDF is 0.6 at ½
            hits += kolmogorov_smirnov(np.where(low, 0, 0.5) + rng.random(num_samples) / 2).p_value <= rate
        return hits

    assert_at_least(caught(needed), runs, 0.9)
    assert caught(needed // 2) < 0.9 * runs


@quick
@pytest.mark.parametrize("rate", [1e-3, 5e-7])
def test_chi_square_needs_about_the_samples_that_it_says(rate: float) -> None:
    """In the hardest direction, half of the cells up and half down by TV 0.1."""
    rng, runs, law = np.random.default_rng(107), 200, np.full(16, 1 / 16)
    wrong = law * np.where(np.arange(16) % 2, 1.2, 0.8)
    needed = samples_needed_tv(law, 0.1, false_fail_rate=rate, false_pass_rate=0.1)
    caught = [
        sum(chi_square(rng.multinomial(n, wrong), law).p_value <= rate for _ in range(runs))
        for n in (needed, needed // 2)
    ]
    assert_at_least(caught[0], runs, 0.9)
    assert caught[1] < 0.9 * runs


@quick
def test_an_e_process_needs_about_the_samples_that_it_says() -> None:
    """The right bet among ten: its median is within a factor 2 of the design, log(30) nats for the mixture included."""
    rng = np.random.default_rng(108)
    p, q = zipf(50), zipf(50)[rng.permutation(50)]
    fault = 0.85 * p + 0.15 * q
    library = {"leak": fault, "draft": q, **{f"other {i}": rng.dirichlet(np.ones(50)) for i in range(8)}}
    kl = float((fault * np.log(fault / p)).sum())
    needed = e_value_samples_needed(kl, 1e-6 / 30)
    crossings, named = [], 0
    for _ in range(40):
        tokens = rng.choice(50, 4 * needed, p=fault)
        process = mix({name: likelihood_ratio_bets((law / p)[tokens]) for name, law in library.items()})
        crossings.append(process.first_crossing(6) or 4 * needed)
        named += process.likeliest in {"leak", "draft"}  # the draft bet at η = 0.05 and 0.3 is a leak, too
    assert needed / 2 <= np.median(crossings) <= needed * 2
    assert named == len(crossings)


@quick
def test_the_distance_bound_covers() -> None:
    """Statement C is violated in at most its rate, here at a true distance of ¼."""
    rng = np.random.default_rng(109)
    bounds = [
        kolmogorov_distance_bound(kolmogorov_smirnov(rng.random(100) ** 2).statistic, 100, false_pass_rate=0.05)
        for _ in range(400)
    ]
    assert_at_most(sum(bound < 0.25 for bound in bounds), 400, 0.05)


# ------------------------------------------------------------------------------------------------ pitfalls of the study


def verified(rng: np.random.Generator, p: Floats, q: Floats, runs: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens of a *correct* one-draft verifier, and whether each was accepted."""
    drafts = rng.choice(len(q), runs, p=q)
    accepted = rng.random(runs) < np.minimum(1, p / q)[drafts]
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    return np.where(accepted, drafts, rng.choice(len(p), runs, p=residual)), accepted


@quick
def test_pitfall_conditioning_on_acceptance_rejects_a_correct_verifier() -> None:
    """All tokens follow the target; those of accepted (or longer) blocks alone do not, and must never be tested."""
    rng = np.random.default_rng(110)
    p, q = zipf(10), zipf(10)[::-1]
    tokens, accepted = verified(rng, p, q, 4000)
    assert chi_square(np.bincount(tokens, minlength=10), p).p_value > 0.01
    for part in (tokens[accepted], tokens[~accepted]):
        assert chi_square(np.bincount(part, minlength=10), p).p_value < 1e-9


@quick
def test_pitfall_jitter_from_the_decoders_own_stream_rejects_a_correct_stream() -> None:
    """The token is the inverse CDF of u; with a jitter of its own the PIT is uniform, with the jitter u it is not."""
    rng = np.random.default_rng(111)
    cdf = np.concatenate(([0.0], np.cumsum(zipf(10))))
    u = rng.random(4000)
    token = np.minimum(np.searchsorted(cdf, u, side="right") - 1, 9)
    pit = {
        name: np.minimum(cdf[token] + jitter * zipf(10)[token], 1)
        for name, jitter in (("own", rng.random(4000)), ("shared", u))
    }
    assert kolmogorov_smirnov(pit["own"]).p_value > 0.01
    assert kolmogorov_smirnov(pit["shared"]).p_value < 1e-6


@quick
def test_pitfall_looking_often_at_a_fixed_sample_test() -> None:
    """KS at 5 %, looked at 20 times, rejects healthy streams over 10 % of the time; the e-process doesn't."""
    rng, runs = np.random.default_rng(112), 100
    looks = range(20, 420, 20)
    by_ks = by_e = 0
    for _ in range(runs):
        values = rng.random(400)
        by_ks += any(kolmogorov_smirnov(values[:n]).p_value <= 0.05 for n in looks)
        by_e += bool(histogram_bets(values).max() >= np.log10(20))
    assert by_ks > 0.1 * runs
    assert_at_most(by_e, runs, 0.05)


@quick
def test_pitfall_dropping_the_eos_rejects_a_correct_stream() -> None:
    """A completion ends at token 0: with it the stream follows the target, without it nothing is ever 0."""
    rng = np.random.default_rng(113)
    p = np.array([0.05, 0.4, 0.3, 0.25])
    tokens = rng.choice(4, 3000, p=p)
    assert chi_square(np.bincount(tokens, minlength=4), p).p_value > 0.01
    assert chi_square(np.bincount(tokens[tokens != 0], minlength=4), p).p_value < 1e-9


@quick
def test_pitfall_the_sum_of_block_lengths_is_not_accepted_over_drafted() -> None:
    """Accepted / drafted in place of Σ min(p, q) under-predicts tokens per step by more than a fifth."""
    rng = np.random.default_rng(114)
    accepted = rng.random((20_000, 5)) < 0.7
    num_accepted = np.cumprod(accepted, axis=1).sum(1)
    counted = 1 + num_accepted.mean()
    rate = num_accepted.sum() / accepted.size
    assert tokens_per_step(np.full(5000, 0.7), 5) == pytest.approx(counted, rel=0.02)
    assert tokens_per_step(np.full(5000, rate), 5) < 0.8 * counted


@quick
def test_pitfall_an_interval_by_token_does_not_cover() -> None:
    """Forty prompts of 50 tokens each: cluster-t covers 95 %, an interval that counts tokens half of that at most."""
    rng, runs = np.random.default_rng(115), 400
    clusters = np.repeat(np.arange(40), 50)
    covered = {"prompt": 0, "token": 0}
    for _ in range(runs):
        values = np.repeat(rng.beta(6, 3, 40), 50) + rng.normal(0, 0.1, 2000)
        for unit, numbers in (("prompt", clusters), ("token", np.arange(2000))):
            interval = cluster_interval(values, numbers)
            covered[unit] += interval.low <= 6 / 9 <= interval.high
    assert_at_least(covered["prompt"], runs, 0.95)
    assert covered["token"] < 0.5 * runs


# ------------------------------------------------------------------------------------------------ longer, at night


@nightly
def test_paired_ratio_intervals_nearly_cover() -> None:
    """Twelve interleaved pairs where the machine's speed wanders: 95 % percentile intervals cover 88 % and more."""
    rng, runs = np.random.default_rng(116), 200
    covered = 0
    for run in range(runs):
        minute = rng.lognormal(0, 0.3, 12)
        off, on = minute * rng.lognormal(0, 0.05, 12), minute * rng.lognormal(0, 0.05, 12) / 1.3
        interval = paired_ratio_interval(off, on, seed=run)
        covered += interval.low <= 1.3 <= interval.high
    assert_at_least(covered, runs, 0.88)
    assert covered > 0.8 * runs


@nightly
@pytest.mark.parametrize("num_samples", [500, 2_000])
def test_chi_square_over_a_vocabulary_rejects_healthy_streams_at_most_at_its_rate(num_samples: int) -> None:
    """1,000 ids, pooled: the study's failing case for limit laws, here at 1e-2."""
    rng, law = np.random.default_rng(117), zipf(1000)
    counts = rng.multinomial(num_samples, law, size=200)
    assert_at_most(sum(chi_square(each, law).p_value <= 0.01 for each in counts), 200, 0.01)


@nightly
def test_ks_keeps_its_rate_on_many_runs() -> None:
    """20,000 runs of 1,000 values at 1e-3."""
    rng = np.random.default_rng(118)
    rejected, steps = 0, np.arange(1, 1001) / 1000
    for _ in range(20):
        values = np.sort(rng.random((1000, 1000)), axis=1)
        distances = np.maximum(steps - values, values - steps + 1e-3).max(1)
        rejected += int((distances >= stats.kstwo.isf(1e-3, 1000)).sum())
    assert_at_most(rejected, 20_000, 1e-3)
    assert_at_least(rejected, 20_000, 1e-3)
