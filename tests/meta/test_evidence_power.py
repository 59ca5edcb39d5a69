"""Every test finds every fault at the number of tokens that it asks for, and alarms no more often than it says.

Its two designs agree; and a correct decoder falls into the study's pitfalls where texts are chosen by how they end.

Every simulation has a fixed seed; long ones run at night.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from specverify.checks.evidence import e_process
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import DraftModel
from specverify.fault_law import FAULT_LAWS, TARGET_ONLY_FAULT_LAWS, fault_ratios
from specverify.models.table import random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.scoring import ScoredTraces, score
from specverify.statistics.categorical import chi_square, pool, samples_needed_tv, smallest_detectable_tv
from specverify.statistics.interval import clopper_pearson
from specverify.statistics.sequential import (
    e_value_samples_needed,
    likelihood_ratio_bets,
    mix,
    smallest_detectable_kl,
)
from specverify.statistics.uniformity import (
    chi_square_uniform,
    kolmogorov_smirnov,
    samples_needed_kolmogorov,
    samples_needed_uniform_tv,
    smallest_detectable_kolmogorov,
    smallest_detectable_uniform_tv,
)

RATES = {"false_fail_rate": 1e-6, "false_pass_rate": 0.1}
RUNS = 24


def at_least(num_hits: int, num_runs: int, rate: float) -> bool:
    """Whether what was seen doesn't contradict a true rate of at least `rate`."""
    return clopper_pearson(num_hits, num_runs, confidence=1 - 1e-4).high >= rate


def at_most(num_hits: int, num_runs: int, rate: float) -> bool:
    """Whether what was seen doesn't contradict a true rate of at most `rate`."""
    return clopper_pearson(num_hits, num_runs, confidence=1 - 1e-4).low <= rate


# ------------------------------------------------------------------------------------------------ designs that agree

EVEN = np.full(20, 1 / 20)
DESIGNS = {
    "kolmogorov": (samples_needed_kolmogorov, smallest_detectable_kolmogorov),
    "chi-square of PIT values": (samples_needed_uniform_tv, smallest_detectable_uniform_tv),
    "chi-square of a law": (
        lambda effect, **rates: samples_needed_tv(EVEN, effect, **rates),
        lambda n, **rates: smallest_detectable_tv(EVEN, n, **rates),
    ),
    "e-process": (e_value_samples_needed, smallest_detectable_kl),
}


@pytest.mark.parametrize("effect", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("name", DESIGNS)
def test_samples_needed_and_smallest_detectable_agree(name: str, effect: float) -> None:
    """Within a factor of 2, each way."""
    needed, smallest = DESIGNS[name]
    number = needed(effect, **RATES)
    assert effect / 2 <= smallest(number, **RATES) <= effect * (1 + 1e-9)
    assert number / 2 <= needed(smallest(number, **RATES), **RATES) <= 2 * number


# ------------------------------------------------------------------------------------------------ size

SIZED = {
    "KS": lambda values: kolmogorov_smirnov(values).p_value,
    "chi-square": lambda values: chi_square_uniform(values).p_value,
}


@pytest.mark.parametrize("name", SIZED)
def test_size_by_scipys_own_power(name: str) -> None:
    """The power against nothing is the size: at most what was asked for."""
    rng = np.random.default_rng(200)
    outcome = stats.power(SIZED[name], rng.random, 60, significance=0.1, n_resamples=500)
    assert at_most(round(float(outcome.power) * 500), 500, 0.1)


# ------------------------------------------------------------------------------------------------ power


@cache
def laws() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Target, draft and the law of every fault at a context of 24 ids."""
    generator = torch.Generator().manual_seed(3)
    p = (1.2 * torch.randn(1, 24, generator=generator, dtype=torch.float64)).softmax(-1)
    q = (p.log() + 0.8 * torch.randn(1, 24, generator=generator, dtype=torch.float64)).softmax(-1)
    faults = {name: law(p, q) for name, law in FAULT_LAWS.items()}
    faults |= {name: law(p) for name, law in TARGET_ONLY_FAULT_LAWS.items()}
    return p[0].numpy(), q[0].numpy(), {name: law[0].numpy() for name, law in faults.items()}


def distances(fault: str) -> tuple[float, float, float]:
    """Kolmogorov distance in the best of three orders, TV, and nats, of a fault's law from the target's."""
    p, q, faults = laws()
    shift = faults[fault] - p
    kolmogorov = max(
        np.abs(np.cumsum(shift[np.argsort(-key, kind="stable")])).max() for key in (q / p, p, np.zeros(len(p)))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        nats = np.nansum(faults[fault] * np.log(faults[fault] / p))
    return float(kolmogorov), float(np.abs(shift).sum() / 2), float(nats)


def drawn(fault: str, number: int, seed: int) -> np.ndarray:
    """Tokens of a fault's law."""
    rng = np.random.default_rng(seed)
    return rng.choice(24, (RUNS, number), p=laws()[2][fault] / laws()[2][fault].sum())


FAULTS = [*FAULT_LAWS, *TARGET_ONLY_FAULT_LAWS]
SLOW = {"draft truncated, raw law reported"}
"""Of 24 ids twenty are kept, so that it takes 10^5 tokens to see that four are not."""
SAMPLED = [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in FAULTS]


@pytest.mark.parametrize("fault", SAMPLED)
def test_ks_finds_every_fault_with_what_it_asks_for(fault: str) -> None:
    """In the order in which the fault is furthest off, at 1e-6 and 90 %."""
    p, q, _ = laws()
    distance = distances(fault)[0]
    number = samples_needed_kolmogorov(distance, **RATES)
    rng = np.random.default_rng(201)
    caught = 0
    for tokens in drawn(fault, number, 202):
        values = []
        for key in (q / p, p, np.zeros(len(p))):
            order = np.argsort(-key, kind="stable")
            below = np.zeros(len(p))
            below[order] = np.cumsum(p[order]) - p[order]
            values.append(np.clip(below[tokens] + rng.random(number) * p[tokens], 0, 1))
        caught += min(kolmogorov_smirnov(each).p_value for each in values) <= RATES["false_fail_rate"]
    assert at_least(caught, RUNS, 0.9), (caught, number, distance)


@pytest.mark.parametrize("fault", SAMPLED)
def test_chi_square_finds_every_fault_with_what_it_asks_for(fault: str) -> None:
    """At one context, whatever the direction; the distance is the one between pooled cells."""
    p, law = laws()[0], laws()[2][fault]

    def pooled_tv(number: int) -> float:
        return float(np.abs(np.bincount(pool(p, number), weights=law - p)).sum() / 2)

    number = next(
        n
        for n in (round(8 * 1.05**k) for k in itertools.count())
        if smallest_detectable_tv(p, n, **RATES) <= pooled_tv(n)
    )
    caught = sum(
        chi_square(np.bincount(tokens, minlength=24), p).p_value <= RATES["false_fail_rate"]
        for tokens in drawn(fault, number, 203)
    )
    assert at_least(caught, RUNS, 0.9), (caught, number)


@pytest.mark.parametrize("fault", SAMPLED)
def test_the_library_finds_and_names_every_fault_with_what_it_asks_for(fault: str) -> None:
    """At e >= 1e6, all bets mixed; a bet close to a fault's is as good a name."""
    p, q, _ = laws()
    bets = 3 * len(FAULTS)
    number = e_value_samples_needed(distances(fault)[2], 1e-6 / bets, false_pass_rate=0.1)
    rows, columns = (torch.from_numpy(each).expand(24, -1) for each in (p, q))
    table = {name: ratio.numpy() for name, ratio in fault_ratios(rows, columns, torch.arange(24)).items()}
    caught = named = 0
    for tokens in drawn(fault, number, 204):
        process = mix({name: likelihood_ratio_bets(ratio[tokens]) for name, ratio in table.items()})
        caught += process.log10_max >= 6
        own = process.components[fault]
        named += own >= process.components[process.likeliest] - 1
    assert at_least(caught, RUNS, 0.9), (caught, number)
    assert at_least(named, RUNS, 0.9), (named, number)


# ------------------------------------------------------------------------------------------------ whole streams

VOCAB_SIZE = 6
TARGET, DRAFT = (random_table(VOCAB_SIZE, 6, seed=seed) for seed in (0, 1))


def decoded(num_samples: int, seed: int = 0, *, as_they_end: bool = False) -> ScoredTraces:
    """Texts of a healthy decoder, in the order in which they were asked for, or in which they ended."""
    params = SamplingParams(max_new_tokens=4, eos_token_ids=(5,))
    request = DecodeRequest(id="r", prompt_ids=(0, 1), params=params, seed=seed)
    decoder = Decoder(target=TARGET, drafter=DraftModel(DRAFT, VOCAB_SIZE), num_speculative_tokens=2)
    traces = list(speculative(decoder, [Row(request, sample) for sample in range(num_samples)]))
    if not as_they_end:
        traces.sort(key=lambda trace: trace.sample)
    return score(traces, target=TARGET, draft=DRAFT, stages=True)


def ever_at_least(log10: float, num_runs: int, texts: int, seed: int) -> int:
    """Healthy runs of so many texts in which the whole e-process, stages included, ever was that high."""
    scored = decoded(num_runs * texts, seed)
    number = scored["trace"].astype(int) // texts
    return sum(e_process(scored.where(number == run)).path.max() >= log10 for run in range(num_runs))


def test_the_whole_e_process_rarely_reaches_20_on_healthy_streams() -> None:
    """With every stage and every bet on a draw in it: in at most 5 % of the runs, at any time."""
    runs = 150
    assert at_most(ever_at_least(math.log10(20), runs, 12, 205), runs, 0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_the_whole_e_process_keeps_its_promise_on_many_streams(seed: int) -> None:
    """2,000 runs: 100 in at most 1 %, 20 in at most 5 %."""
    runs = 400
    for level, rate in ((20, 0.05), (100, 0.01)):
        assert at_most(ever_at_least(math.log10(level), runs, 25, 210 + seed), runs, rate)


def test_pitfall_texts_in_the_order_in_which_they_end() -> None:
    """Short texts end first, so the beginning of such a stream is text that was chosen for its EOS: a false proof."""
    assert e_process(decoded(600)).log10_max < 3
    assert e_process(decoded(600, as_they_end=True)).log10_max > 6


def test_pitfall_only_texts_that_ended_by_themselves() -> None:
    """Conditioning on length: each such text is a right one, and together they are not the target's law."""
    scored = decoded(1_000)
    ended = np.array([len(trace.token_ids) < 4 for trace in scored.traces])
    kept = scored.where(ended[scored["trace"].astype(int)])
    assert kolmogorov_smirnov(scored["pit_id"]).p_value > 1e-3
    assert kolmogorov_smirnov(kept["pit_id"]).p_value < 1e-9


def test_pitfall_only_blocks_of_one_length() -> None:
    """The first tokens of a block of one token are replacements, those of longer ones accepted drafts: neither is p."""
    scored = decoded(1_000)
    first = np.array([trace.steps[0].num_emitted_tokens for trace in scored.traces])
    at_first = scored["position"] == 0
    length = first[scored["trace"].astype(int)]
    assert kolmogorov_smirnov(scored["pit_ratio"][at_first]).p_value > 1e-3
    for only in (1, 2):
        assert kolmogorov_smirnov(scored["pit_ratio"][at_first & (length == only)]).p_value < 1e-6
