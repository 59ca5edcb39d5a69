"""The acceptance check: what is expected, what is measured, and which of the two sides of a difference is which fault."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from specverify.checks.acceptance import (
    acceptance,
    boundaries,
    smallest_detectable_shift,
    tokens_per_step_interval,
)
from specverify.checks.counters import drafts_tested
from specverify.choices.enumerate import Enumerate, every_path
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import DraftModel, DraftTree, NoDraft
from specverify.engines.reference import ReferenceEngine
from specverify.faults import find_fault
from specverify.judge import judge
from specverify.models.table import TableModel, TableSession, random_table
from specverify.plan import Plan
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, FinishReason, SamplingParams, Verdict
from specverify.scoring import ScoredTraces, score
from specverify.statistics.acceptance import tokens_per_step
from specverify.statistics.budget import e_threshold
from specverify.statistics.sequential import bernoulli_bets
from specverify.subject import EncodedPrompt, Subject
from specverify.verification.chain import sample_and_match
from specverify.verification.rules import Drafts
from tests.unit.trees import rule_for

VOCAB_SIZE = 4
PLAN = Plan(lossless_tokens=6_000, max_new_tokens=7, batch_size=400)
TARGET = random_table(VOCAB_SIZE, 9, seed=1, name="target")
DRAFT = TableModel(
    tuple(
        (0.7 * level + other).log_softmax(-1)
        for level, other in zip(TARGET.levels, random_table(VOCAB_SIZE, 9, seed=2, sharpness=0.5).levels, strict=True)
    ),
    name="draft",
)
PROMPTS = tuple(
    EncodedPrompt(id=f"p{number}", domain="even" if number % 2 == 0 else "odd", token_ids=(number // 4, number % 4))
    for number in range(16)
)


def subject(change=lambda decoder: decoder, draft=DRAFT):
    """A decoder over tables, with one part of it changed."""
    decoder = change(Decoder(target=TARGET, drafter=DraftModel(draft, VOCAB_SIZE)))
    engine = ReferenceEngine(decoder, batch_size=PLAN.batch_size)
    return Subject(engine=engine, target=TARGET, draft=draft, prompts=PROMPTS, decoder=decoder)


def answered(asked_of, plan):
    """What the check asks until it has enough."""
    scored = ScoredTraces()
    for requests in acceptance.rounds(asked_of, plan):
        traces = list(asked_of.engine.decode(requests))
        scored = scored.merge(score(traces, target=asked_of.target, draft=asked_of.draft))
        if acceptance.decided(plan, scored):
            break
    return scored


def concluded(asked_of, scored, plan=PLAN):
    """The verdict after the judge."""
    return judge([acceptance.conclude(asked_of, plan, scored)], plan.false_fail_rate)[0][0]


@lru_cache
def stream(change=lambda decoder: decoder):
    """A subject and its scored stream."""
    asked_of = subject(change)
    return asked_of, answered(asked_of, PLAN)


@dataclass(frozen=True)
class MixedUp:
    """A model whose cache, after a rejection, holds another token in the last place than the one that was kept."""

    inner: TableModel

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, prompts):
        """A session that is only now and then wrong."""
        return MixedUpSession(self.inner, self.inner.open(prompts))


@dataclass
class MixedUpSession:
    """A table's session whose rollback is wrong."""

    model: TableModel
    inner: TableSession

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def rollback(self, lengths):
        """Keeps the right number of tokens."""
        held, size = self.inner.lengths, self.model.vocab_size
        self.inner.rollback(lengths)
        index = self.inner._index
        self.inner._index = torch.where(lengths < held, index // size * size + (index + 1) % size, index)


def traced(*steps, finish=FinishReason.LENGTH):
    """A trace with these steps (drafted, accepted, emitted) and as many tokens."""
    each = tuple(DecodeStep(*step) for step in steps)
    emitted = sum(step.num_emitted_tokens for step in each)
    request = DecodeRequest(id="r", prompt_ids=(0,), prompt_id="p")
    return DecodeTrace(request=request, sample=0, token_ids=(0,) * emitted, finish=finish, steps=each)


def unscored(*traces):
    """Traces with nothing but the columns that say where a token is."""
    owners = np.repeat(np.arange(len(traces)), [len(trace.token_ids) for trace in traces]).astype(float)
    return ScoredTraces(traces, {"trace": owners, "token": np.zeros(len(owners))})


def exact_paths(decoder, num_tokens):
    """Every trace of a whole decode after the prompt (0,), with its exact probability."""
    request = DecodeRequest(id="all", prompt_ids=(0,), params=SamplingParams(max_new_tokens=num_tokens))
    traces, weights = [], []

    def program(choices: Enumerate) -> torch.Tensor:
        rows = [Row(request, path) for path in range(len(choices.records))]
        ended = list(speculative(replace(decoder, choices=lambda _: choices), rows))
        traces.extend(sorted(ended, key=lambda trace: trace.sample))
        return torch.arange(len(rows))

    for _, weight in every_path(program):
        weights += weight.tolist()
    return traces, np.array(weights)


@lru_cache
def exact():
    """All paths of four tokens with two drafts a step over tables of three ids."""
    target, draft = (random_table(3, 6, seed=seed, name=name) for seed, name in ((3, "target"), (4, "draft")))
    decoder = Decoder(target=target, drafter=DraftModel(draft, 3), num_speculative_tokens=2)
    traces, weights = exact_paths(decoder, 4)
    return score(traces, target=target, draft=draft), weights


# ---------------------------------------------------------------------------------------------- what was tested


@pytest.mark.parametrize(
    ("step", "accepted"),
    [
        ((3, 3, 4), [True, True, True]),
        ((3, 1, 2), [True, False]),
        ((3, 0, 1), [False]),
        ((3, 2, 2), [True, True]),  # a stop inside the block: what follows was not tested
        ((1, 1, 1), [True]),  # a stop on the only draft
        ((0, 0, 1), []),
    ],
)
def test_a_step_tests_what_it_accepts_and_the_first_that_it_rejects(step, accepted):
    """The bonus, and drafts behind a rejection or a stop, were not tested."""
    tested = drafts_tested(unscored(traced(step)))
    assert tested.accepted.tolist() == accepted
    assert tested.rows.tolist() == tested.places.tolist() == list(range(len(accepted)))


def test_rows_go_on_from_step_to_step_and_from_trace_to_trace():
    """The row of a tested draft is that of the token emitted in its place."""
    tested = drafts_tested(unscored(traced((2, 1, 2), (2, 2, 3)), traced(), traced((1, 0, 1), (0, 0, 1), (1, 1, 2))))
    assert tested.rows.tolist() == [0, 1, 2, 3, 5, 7]
    assert tested.accepted.tolist() == [True, False, True, True, False, True]
    assert tested.places.tolist() == [0, 1, 0, 1, 0, 0]


def test_flags_have_exactly_the_expected_probability_at_each_place():
    """Over all paths of a decode, accepted minus Σ min(p, q) averages to 0 at each place of a block, to rounding."""
    scored, weights = exact()
    assert weights.sum() == pytest.approx(1)
    tested = drafts_tested(scored)
    owners = scored["trace"].astype(int)[tested.rows]
    excess = weights[owners] * (tested.accepted - scored["overlap"][tested.rows])
    assert len(weights) > 900
    for place in (0, 1):
        assert excess[tested.places == place].sum() == pytest.approx(0, abs=1e-12)


def test_programme_gives_exactly_the_steps_of_every_text():
    """Of all paths that emit one text, the mean number of steps is what the posterior acceptance of its tokens says."""
    scored, weights = exact()
    mass, steps, rows = defaultdict(float), defaultdict(float), {}
    starts = np.searchsorted(scored["trace"], np.arange(len(scored.traces)))
    for trace, weight, start in zip(scored.traces, weights, starts, strict=True):
        mass[trace.token_ids] += weight
        steps[trace.token_ids] += weight * len(trace.steps)
        rows[trace.token_ids] = slice(start, start + len(trace.token_ids))
    assert len(mass) == 3**4
    for text, place in rows.items():
        predicted = len(text) / tokens_per_step(scored["posterior"][place], 2)
        assert steps[text] / mass[text] == pytest.approx(predicted, abs=1e-9)


# ---------------------------------------------------------------------------------------------- healthy


def test_a_healthy_decoder_passes():
    """Measured and expected agree; both sides are tested and held."""
    result = concluded(*stream())
    assert result.verdict is Verdict.PASS
    assert [test.failed for test in result.tests] == [False, False]
    assert max(test.log10_e for test in result.tests) < 3
    shown = result.measurements
    assert shown["accepted_of_tested"] == pytest.approx(shown["expected_of_tested"], abs=0.04)


def test_three_acceptances_are_told_apart():
    """Accepted / drafted counts the drafts behind a rejection, so it is the smallest; the length counts the bonus."""
    asked_of, scored = stream()
    shown = concluded(asked_of, scored).measurements
    assert shown["acceptance_rate"] < shown["expected_acceptance"]
    assert shown["acceptance_rate"] == shown["num_accepted_tokens"] / shown["num_draft_tokens"]
    assert shown["mean_acceptance_length"] == 1 + shown["num_accepted_tokens"] / shown["num_drafts"]
    assert shown["expected_acceptance"] == pytest.approx(scored["overlap"].mean())


def test_programme_predicts_the_measured_tokens_per_step():
    """No speculative run is needed to know how long the steps are."""
    shown = concluded(*stream()).measurements
    assert shown["tokens_per_step_with_3_drafts"] == pytest.approx(shown["measured_tokens_per_step"], rel=0.03)
    predicted = [shown[f"tokens_per_step_with_{g}_drafts"] for g in range(1, 9)]
    assert predicted == sorted(predicted)


def test_interval_resamples_prompts():
    """The estimate is that of all transcripts; one prompt bounds nothing but what a step can emit at all."""
    _, scored = stream()
    interval = tokens_per_step_interval(scored, 3, seed=0)
    assert interval.estimate == pytest.approx(tokens_per_step(scored["posterior"], 3, boundaries(scored)))
    assert 1 < interval.low < interval.estimate < interval.high < 4
    alone = tokens_per_step_interval(scored.where(scored.prompts() == 0), 3, seed=0)
    assert (alone.low, alone.high) == (1, 4)


def test_furthest_prompts_are_named():
    """The five prompts of the least mean overlap, as something worth knowing."""
    asked_of, scored = stream()
    prompts = scored.prompts()
    means = {int(number): scored["overlap"][prompts == number].mean() for number in np.unique(prompts)}
    worst = min(means, key=means.get)
    finding = concluded(asked_of, scored).findings[-1]
    assert finding.severity is Verdict.PASS
    assert finding.text.split("after: ")[1].startswith(f"p{worst} (")  # prompts are numbered as they come
    assert finding.text.count("(") == 5


def test_plots_show_what_the_check_says():
    """By position, place, domain and number of drafts; every end of an interval can be drawn."""
    asked_of, scored = stream()
    plots = {plot.id: plot for plot in concluded(asked_of, scored).plots}
    assert set(plots) == {
        "acceptance/position", "acceptance/place", "acceptance/domain", "acceptance/tokens_per_step",
    }  # fmt: skip
    measured, expected = plots["acceptance/place"].series
    assert measured.x == ("draft 1", "draft 2", "draft 3")
    assert measured.y == pytest.approx(expected.y, abs=0.1)
    for series in (series for plot in plots.values() for series in plot.series):
        assert np.isfinite([*series.y, *series.low, *series.high]).all()


# ---------------------------------------------------------------------------------------------- faults


def test_more_acceptance_than_the_laws_allow_is_proof_of_lossiness():
    """Accepting every draft fails the upper side, and that one only."""
    result = concluded(*stream(find_fault("always-accept").apply))
    assert result.verdict is Verdict.FAIL
    assert [test.failed for test in result.tests] == [True, False]
    assert "lossiness" in result.summary


def test_a_broken_draft_cache_shows_as_less_acceptance():
    """The draft sees a rejected token: still lossless, but the lower side fails, and that one only."""
    mixed_up = DraftModel(MixedUp(DRAFT), VOCAB_SIZE)
    result = concluded(*stream(lambda decoder: replace(decoder, drafter=mixed_up)))
    assert result.verdict is Verdict.FAIL
    assert [test.failed for test in result.tests] == [False, True]
    assert "draft" in result.summary


def test_a_rule_that_matches_tokens_is_held_to_the_upper_side_alone():
    """It accepts Σ p q, less than Σ min(p, q), and is lossless all the same."""
    result = concluded(*stream(lambda decoder: replace(decoder, rule=sample_and_match)))
    assert result.verdict is Verdict.PASS
    assert [test.name.split()[0] for test in result.tests] == ["more"]


def test_greedy_verification_is_proof_of_lossiness():
    """A sharp draft proposes the target's favourite, and has it accepted, more often than Σ min(p, q) allows."""
    sharp = TableModel(tuple((3 * level).log_softmax(-1) for level in TARGET.levels))
    asked_of = subject(find_fault("greedy-verification").apply, draft=sharp)
    result = concluded(asked_of, answered(asked_of, PLAN))
    assert result.verdict is Verdict.FAIL
    assert [test.failed for test in result.tests] == [True]


def test_an_unknown_rule_is_measured_only():
    """Block verification may accept more at one place, so a black box's steps prove nothing."""
    asked_of, scored = stream(find_fault("always-accept").apply)
    result = concluded(replace(asked_of, decoder=None), scored)
    assert (result.verdict, result.tests) == (Verdict.PASS, ())
    assert result.measurements["acceptance_rate"] > 0.9


# ---------------------------------------------------------------------------------------------- little is known


def test_nothing_drafted_is_inconclusive():
    """Whatever else the stream shows."""
    result = concluded(*stream(lambda decoder: replace(decoder, drafter=NoDraft(VOCAB_SIZE))))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "nothing was drafted" in result.summary


def test_a_draft_without_a_law_is_counted_only():
    """Prompt lookup and black boxes: no expectation, but the counters."""
    asked_of, scored = stream()
    known = ("overlap", "posterior", "pit_ratio")
    blind = replace(scored, columns={name: each for name, each in scored.columns.items() if name not in known})
    result = concluded(replace(asked_of, draft=None), blind)
    assert result.verdict is Verdict.NOT_RUN
    assert result.measurements["num_drafts"] > 0


def test_an_engine_that_tells_no_steps_is_not_run():
    """Its acceptance is expected, not measured."""
    asked_of, scored = stream()
    silent = replace(scored, traces=tuple(replace(trace, steps=()) for trace in scored.traces))
    result = concluded(asked_of, silent)
    assert (result.verdict, result.tests) == (Verdict.NOT_RUN, ())
    assert math.isnan(result.measurements["acceptance_rate"])
    assert result.measurements["expected_acceptance"] == pytest.approx(scored["overlap"].mean())


def test_a_draft_below_the_minimum_is_refused():
    """Only where the whole interval is below it."""
    asked_of, scored = stream()
    shown = concluded(asked_of, scored).measurements
    for minimum, verdict in (
        (shown["expected_acceptance_high"] + 0.01, Verdict.FAIL),
        (shown["expected_acceptance"], Verdict.PASS),
    ):
        result = concluded(asked_of, scored, replace(PLAN, minimum_acceptance=minimum))
        assert result.verdict is verdict
        assert ("refused a rollout" in result.findings[0].text) == (verdict is Verdict.FAIL)


def test_a_pass_that_could_hide_much_is_inconclusive():
    """Too few drafts to show it, and the finding says how many would."""
    asked_of, scored = stream()
    few = replace(scored.where(scored["trace"] < 40), traces=scored.traces[:40])
    result = concluded(asked_of, few)
    assert (result.verdict, "gone unseen" in result.findings[0].text) == (Verdict.INCONCLUSIVE, True)
    assert concluded(asked_of, scored).verdict is Verdict.PASS


def test_smallest_detectable_shift_is_seen():
    """Nine in ten runs with that shift fail, on either side, at the threshold that a run's share gives."""
    random = np.random.default_rng(5)
    probs = random.beta(4, 2, size=3_000)
    shift = smallest_detectable_shift(probs, Plan())
    threshold = e_threshold(Plan().false_fail_rate / 2, 16)
    ends = {side: [getattr(bernoulli_bets(random.random(len(probs)) < np.clip(probs + move, 0, 1), probs), side)[-1]
                   for _ in range(100)]
            for side, move in (("above", shift), ("below", -shift))}  # fmt: skip
    for side, paths in ends.items():
        assert np.mean(np.array(paths) >= threshold) > 0.8, side
    assert 0.03 < shift < 0.1


def test_siblings_of_a_tree_are_not_held_to_the_chains_acceptance():
    """Three drafts a position are accepted more often than Σ min(p, q); that is what they are for, and no fault."""
    way = Drafts.WITHOUT_REPLACEMENT
    asked_of, scored = stream(
        lambda decoder: replace(
            decoder, drafts=way, rule=rule_for(way), drafter=DraftTree(DRAFT, DRAFT.vocab_size, (3,), way)
        )
    )
    assert concluded(asked_of, scored).tests == ()
    as_a_chain = replace(asked_of, decoder=replace(asked_of.decoder, drafts=Drafts.CHAIN))
    assert any(test.log10_e > 7 for test in concluded(as_a_chain, scored).tests)
