"""The cost check, on a clock that only moves when a model is asked: no assertion depends on how fast this machine is."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specverify.checks import cost as module
from specverify.checks.cost import Timings, cost, measured_costs, measured_speedup, verdict_of
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.plan import Plan
from specverify.records import Verdict
from specverify.scoring import ScoredTraces
from specverify.statistics.interval import Interval
from tests.unit.checks.hashed import VOCAB_SIZE, answered, subject

PLAN = Plan(lossless_tokens=300, max_new_tokens=16, batch_size=32, cost_repeats=4)


@dataclass
class Clock:
    """Seconds that pass only in the passes of a `Timed` model, and are made longer by what is in `stalls`."""

    now: float = 0.0
    passes: int = 0
    stalls: dict[int, float] = field(default_factory=dict)
    """Number of the pass to the factor by which it is slowed down."""

    def __call__(self):
        return self.now

    def pass_takes(self, seconds):
        """One pass."""
        self.now += seconds * self.stalls.get(self.passes, 1.0)
        self.passes += 1


@dataclass(frozen=True)
class Timed:
    """A model whose passes take `first` seconds for one token and `more` for each further one."""

    inner: object
    clock: Clock
    first: float
    more: float = 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, prompts):
        """Prefill is free."""
        return TimedSession(self.inner.open(prompts), self)


@dataclass
class TimedSession:
    """A session that moves the clock."""

    inner: object
    model: Timed

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def append(self, token_ids, num_tokens):
        """A pass."""
        self.model.clock.pass_takes(self.model.first + self.model.more * (int(num_tokens.max()) - 1))
        return self.inner.append(token_ids, num_tokens)


def timed(*, draft_s, more_s=0.0, num_speculative_tokens=3, **clock):
    """A subject whose target takes a second a token, and the clock."""
    watch, well = Clock(**clock), subject()
    target, draft = Timed(well.target, watch, 1.0, more_s), Timed(well.draft, watch, draft_s)
    decoder = Decoder(
        target=target, drafter=DraftModel(draft, VOCAB_SIZE), num_speculative_tokens=num_speculative_tokens
    )
    return replace(well, target=target, draft=draft, decoder=decoder, engine=ReferenceEngine(decoder)), watch


@lru_cache
def scored():
    """A stream of the healthy subject, for the prediction."""
    requests = next(iter(cost.rounds(subject(), PLAN)))
    return answered(replace(cost, rounds=lambda *_: [requests]), subject(), PLAN)


def concluded(plan=PLAN, **costs):
    """The result on that subject."""
    asked_of, clock = timed(num_speculative_tokens=plan.num_speculative_tokens, **costs)
    return cost.conclude(asked_of, plan, scored(), clock=clock)


def scripted(monkeypatch, pairs):
    """`measured_speedup` on made-up times, and which requests it timed in which order."""
    told, script = [], iter(pairs)

    def timed_pair(_decoder, request, *, alone_first, clock):
        del clock
        told.append((request, alone_first))
        return next(script)

    monkeypatch.setattr(module, "_timed", timed_pair)
    timings = measured_speedup(None, ["a", "b", "c"], repeats=6, minimum=1.0, seed=0, clock=None)
    return timings, told


# ---------------------------------------------------------------------------------------------- stop watches


def test_passes_are_timed_by_the_number_of_tokens():
    """T(k) of the target and T(1) of the draft; a slow first turn is thrown away, a single stall does not move a median."""
    stalls = dict.fromkeys((*range(10), 12), 50.0)
    asked_of, clock = timed(draft_s=0.1, more_s=0.05, stalls=stalls)
    costs = measured_costs(asked_of.target, asked_of.draft, (1, 2, 3), most=9, repeats=3, clock=clock)
    assert costs.target_ms == pytest.approx({k: 1000 + 50 * (k - 1) for k in range(1, 10)})
    assert costs.draft_ms == pytest.approx(100)
    assert costs.cost_ratio == pytest.approx(0.1)
    assert costs.verification_ratio(3) == pytest.approx(1.15)
    assert clock.passes == 4 * 10


def test_nothing_is_collected_while_the_clock_runs():
    """A collection falls in one arm or the other by chance; afterwards it is on again, even after an error."""
    running = []
    module.seconds(torch.device("cpu"), lambda: running.append(gc.isenabled()), Clock())
    assert running == [False]
    with pytest.raises(ZeroDivisionError):
        module.seconds(torch.device("cpu"), lambda: 1 / 0, Clock())
    assert gc.isenabled()


def test_pairs_take_turns_and_every_request(monkeypatch):
    """A warm-up that is thrown away; then each request in turn, and the other way round in the next sweep."""
    timings, told = scripted(monkeypatch, itertools.chain([(9.0, 9.0)], itertools.repeat((2.0, 1.0))))
    assert [request for request, _ in told[1:]] == ["a", "b", "c"] * 2
    first, second = told[1:4], told[4:7]
    assert all(one[1] != other[1] for one, other in zip(first, second, strict=True))
    assert {alone_first for _, alone_first in first} == {True, False}
    assert timings.alone_s == (2.0,) * 6


def test_an_undecided_measurement_goes_on_until_it_is_decided(monkeypatch):
    """The first pairs say nothing; the next ones decide, and no more are timed. All are kept."""
    undecided = [(1.0, 1.0), *[(1.0, 1.4), (1.4, 1.0)] * 3]
    timings, _ = scripted(monkeypatch, itertools.chain(undecided, itertools.repeat((3.0, 1.0))))
    assert len(timings.alone_s) == 12
    assert timings.speedup(0).low > 1


def test_an_undecided_measurement_ends(monkeypatch):
    """After three times the repeats, whatever it shows."""
    timings, _ = scripted(monkeypatch, itertools.cycle([(1.0, 1.4), (1.4, 1.0)]))
    assert len(timings.alone_s) == 18
    assert verdict_of(timings.speedup(0), 1.0) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 1.3, Verdict.PASS), (0.7, 0.9, Verdict.FAIL), (0.9, 1.1, Verdict.INCONCLUSIVE)],
)
def test_the_interval_decides(low, high, verdict):
    """Above the minimum, below it, or neither."""
    assert verdict_of(Interval(1.0, low, high, 0.95), 1.0) is verdict


def test_a_stalled_pair_refuses_nothing():
    """One decode that was held up widens the interval; a clear win does not become a refusal by it."""
    alone, speculative = np.full(12, 2.0), np.full(12, 1.0)
    speculative[5] = 20.0
    assert verdict_of(Timings(tuple(alone), tuple(speculative)).speedup(0), 1.0) is not Verdict.FAIL


# ---------------------------------------------------------------------------------------------- verdicts


def test_a_cheap_draft_earns_a_rollout():
    """Measured and predicted agree where nothing but passes costs time."""
    result = concluded(replace(PLAN, cost_repeats=24), draft_s=0.02, more_s=0.01)
    shown = result.measurements
    assert result.verdict is Verdict.PASS
    assert shown["measured_speedup_low"] > 1.5
    assert shown["measured_speedup"] == pytest.approx(shown["predicted_speedup"], rel=0.15)
    assert shown["predicted_speedup_low"] < shown["predicted_speedup"] < shown["predicted_speedup_high"]
    assert shown["tokens_per_step"] / (3 * 0.02 + 1.03) == pytest.approx(shown["predicted_speedup"])
    assert result.num_samples == 24


def test_a_dear_draft_is_refused_on_cost():
    """It says that the pair may be correct, and that no number of tokens helps."""
    result = concluded(draft_s=0.9)
    assert result.verdict is Verdict.FAIL
    assert result.measurements["measured_speedup_high"] < 1
    assert result.measurements["best_num_speculative_tokens"] == 0
    assert result.findings[0].text.startswith("correct or not, this pair is refused a rollout on cost")
    assert "a loss with this draft at every number of speculative tokens" in result.advice


def test_a_better_number_of_tokens_is_named():
    """Sixteen drafts are too many here; the pair is refused as it was asked for, and told what to ask for."""
    result = concluded(replace(PLAN, num_speculative_tokens=16), draft_s=0.5)
    best = result.measurements["best_num_speculative_tokens"]
    assert result.verdict is Verdict.FAIL
    assert 1 <= best <= 8
    assert f"try --num-speculative-tokens {best}" in result.advice


def test_a_minimum_inside_the_interval_is_not_decided():
    """All extensions are used; then it is INCONCLUSIVE, with what would help."""
    wanted = concluded(replace(PLAN, minimum_speedup=5.0), draft_s=0.1)
    again = concluded(replace(PLAN, minimum_speedup=wanted.measurements["measured_speedup"]), draft_s=0.1)
    assert wanted.verdict is Verdict.FAIL
    assert "try" not in wanted.advice
    assert again.verdict is Verdict.INCONCLUSIVE
    assert again.num_samples == 3 * PLAN.cost_repeats
    assert "cost_repeats" in again.advice


def test_every_raw_time_is_kept_and_every_plot_can_be_drawn():
    """As many times as pairs; predicted from 1 to 8 with the measured point, T(k) / T(1) from 1 to 9."""
    result = concluded(draft_s=0.1, more_s=0.1)
    for name in ("raw_alone_ms_per_token", "raw_speculative_ms_per_token"):
        assert len(result.measurements[name].split(", ")) == result.num_samples
    assert set(map(float, result.measurements["raw_alone_ms_per_token"].split(", "))) == {1000.0}
    speedup, passes = result.plots
    assert speedup.series[0].x == tuple(range(1, 9))
    assert speedup.series[1].x == (3,)
    assert passes.series[0].y == pytest.approx([1 + 0.1 * k for k in range(9)])
    for series in (*speedup.series, *passes.series):
        assert np.isfinite([*series.y, *series.low, *series.high]).all()


# ---------------------------------------------------------------------------------------------- what can't be timed


def test_nothing_to_time_is_not_run():
    """A black box, a draft without a model, a stream without the draft's law, and prompts that leave no room."""
    asked_of, clock = timed(draft_s=0.1)
    short = replace(asked_of, draft=replace(asked_of.draft, inner=replace(asked_of.draft.inner, max_length=8)))
    for nothing, stream in (
        (replace(asked_of, decoder=None), scored()),
        (replace(asked_of, draft=None), scored()),
        (asked_of, ScoredTraces()),
        (short, scored()),
    ):
        assert cost.conclude(nothing, PLAN, stream, clock=clock).verdict is Verdict.NOT_RUN
    assert clock.passes == 0


def test_a_stop_does_not_shorten_what_is_timed():
    """Every decode has the same length, so that no prefill is timed in place of decoding."""
    ids = tuple(range(VOCAB_SIZE))
    asked_of, clock = timed(draft_s=0.1)
    stopping = replace(PLAN, params=replace(PLAN.params, stop_token_ids=ids, stop_strings=("a",)))
    result = cost.conclude(replace(asked_of, eos_token_ids=ids), stopping, scored(), clock=clock)
    assert result.measurements["alone_tokens_per_s"] == pytest.approx(1)
    assert result.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}, 2 * 2 * 64 * 2),
        (
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
            2 * 2 * 32 * 2,
        ),
        ({"hidden_size": 64}, 0),
    ],
)  # fmt: skip
def test_the_kv_cache_is_counted_by_the_configuration(config, size):
    """Layers x key-value heads x width, twice, in the model's own type; 0 where it isn't told."""
    text_config = SimpleNamespace(**config)
    loaded = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text_config if decoder else None),
        model=SimpleNamespace(dtype=torch.float16),
    )
    assert module.kv_bytes_per_token(loaded) == size
