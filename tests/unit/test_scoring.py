"""Scores against a slow, literal computation on tables, and what the statistics rest on: uniform PITs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import stats

from specverify import scoring
from specverify.choices import Stream
from specverify.choices.philox import uniform53
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.table import random_table
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams
from specverify.scoring import ScoredTraces, score

VOCAB_SIZE = 5
TARGET = random_table(VOCAB_SIZE, 6, seed=0, zeros=0.2)
DRAFT = random_table(VOCAB_SIZE, 6, seed=1, zeros=0.2)
ORDERS = ("pit_id", "pit_prob", "pit_ratio")


@lru_cache
def decoded(
    num_samples: int, params: SamplingParams | None = None, *, target_only: bool = False
) -> tuple[DecodeTrace, ...]:
    """Samples of a few ragged requests."""
    params = params or SamplingParams(max_new_tokens=3)
    rows = [
        Row(DecodeRequest(id=str(seed), prompt_ids=prompt, params=params, seed=seed), sample)
        for seed, prompt in enumerate([(0, 1), (2,), (3, 3, 1)])
        for sample in range(num_samples)
    ]
    decoder = Decoder(target=TARGET, drafter=DraftModel(DRAFT, VOCAB_SIZE))
    return tuple((autoregressive if target_only else speculative)(decoder, rows))


@lru_cache
def many(source: str) -> ScoredTraces:
    """Many scored samples of the target, of lossless speculation, or of the draft passed off as the target."""
    if source != "draft":
        return score(decoded(600, target_only=source == "target"), target=TARGET, draft=DRAFT)
    decoder = Decoder(target=DRAFT, drafter=DraftModel(DRAFT, VOCAB_SIZE))
    rows = [Row(trace.request, trace.sample) for trace in decoded(600)]
    return score(list(autoregressive(decoder, rows)), target=TARGET, draft=DRAFT)


def literal_law(model: object, prefix: tuple[int, ...], params: SamplingParams) -> list[float]:
    """The table's row under temperature and top-k, in plain Python."""
    logits = [value / params.temperature for value in model.row(prefix).tolist()]
    if params.top_k:
        least = sorted(logits, reverse=True)[params.top_k - 1]
        logits = [value if value >= least else -math.inf for value in logits]
    mass = [math.exp(value) for value in logits]
    return [value / sum(mass) for value in mass]


def literal_pit(p: list[float], key: list[float], token: int, jitter: float) -> float:
    """Mass before the token in the order of falling key, ties by id, plus a random part of its own."""
    order = sorted(range(len(p)), key=lambda one: (-key[one], one))
    return sum(p[one] for one in order[: order.index(token)]) + jitter * p[token]


@pytest.mark.parametrize(
    "params", [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=3, temperature=0.7, top_k=3)]
)
def test_every_column_is_the_literal_computation(params: SamplingParams) -> None:
    """Probability, rank, entropy, gap, margin, the PIT in three orders, overlap and posterior, token by token."""
    traces = decoded(4, params)
    scored = score(traces, target=TARGET, draft=DRAFT)
    index = 0
    for number, trace in enumerate(traces):
        for position, token in enumerate(trace.token_ids):
            prefix = trace.request.prompt_ids + trace.token_ids[:position]
            p, q = (literal_law(model, prefix, params) for model in (TARGET, DRAFT))
            raw = TARGET.row(prefix).tolist()
            jitter = float(
                uniform53(*map(torch.tensor, (trace.request.seed, Stream.JITTER, trace.sample, position, 0)))
            )
            ratio = [q[one] / p[one] if p[one] > 0 else -1.0 for one in range(VOCAB_SIZE)]
            top, second = sorted(raw, reverse=True)[:2]
            expected = {
                "trace": number,
                "position": position,
                "token": token,
                "prob": p[token],
                "rank": sum(other > p[token] for other in p),
                "entropy": -sum(value * math.log(value) for value in p if value),
                "gap": top - raw[token],
                "margin": top - second,
                "first_choice": float(raw.index(top) == token),
                "pit_id": literal_pit(p, [0.0] * VOCAB_SIZE, token, jitter),
                "pit_prob": literal_pit(p, p, token, jitter),
                "pit_ratio": literal_pit(p, ratio, token, jitter),
                "overlap": sum(map(min, p, q)),
                "posterior": min(1.0, q[token] / p[token]),
                "edge": 0.0,
                "preferred": float(q[token] > p[token]),
                "preferred_prob": sum(here for here, there in zip(p, q, strict=True) if there > here),
            }
            assert set(expected) == set(scored.columns)
            for name, value in expected.items():
                assert scored[name][index] == pytest.approx(value, abs=1e-12), name
            index += 1
    assert index == len(scored)


def test_overlap_is_the_expected_acceptance() -> None:
    """The mean posterior under the target's own samples estimates Σ min(p, q) of the same contexts."""
    scored = many("target")
    difference = scored["posterior"] - scored["overlap"]
    assert abs(difference.mean()) < 4 * difference.std() / len(scored) ** 0.5


@pytest.mark.parametrize("source", ["target", "speculative"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_pit_of_target_samples_is_uniform(order: str, source: str) -> None:
    """Target-only and lossless speculative samples alike; the seed is fixed, the level is one in ten thousand."""
    assert stats.kstest(many(source)[order], "uniform").pvalue > 1e-4


@pytest.mark.parametrize("order", ORDERS)
def test_the_pit_of_draft_samples_is_not(order: str) -> None:
    """The draft passed off as the target is seen in every order."""
    assert stats.kstest(many("draft")[order], "uniform").pvalue < 1e-9


def test_consecutive_pit_values_are_independent() -> None:
    """No token's value tells the next one's."""
    scored = many("speculative")
    follows = (np.diff(scored["trace"]) == 0).nonzero()[0]
    for order in ORDERS:
        correlation = np.corrcoef(scored[order][follows], scored[order][follows + 1])[0, 1]
        assert abs(correlation) < 4.5 / len(follows) ** 0.5


def test_an_impossible_token_has_probability_zero_and_an_infinite_bet() -> None:
    """A token outside the target's support needs no statistics."""
    request = DecodeRequest(id="r", prompt_ids=(0,), params=SamplingParams(top_k=1, max_new_tokens=1))
    worst = int(TARGET.row((0,)).argmin())
    trace = DecodeTrace(request=request, sample=0, token_ids=(worst,), finish=FinishReason.LENGTH)
    scored = score([trace], target=TARGET, draft=DRAFT)
    assert scored["prob"].tolist() == [0]
    assert scored["posterior"].tolist() == [0]
    assert 0 <= scored["pit_id"][0] <= 1


def test_without_a_draft_its_columns_are_absent() -> None:
    """A black box is scored by the target alone."""
    scored = score(decoded(2), target=TARGET)
    assert not {"pit_ratio", "overlap", "posterior"} & set(scored.columns)
    assert len(scored["overlap"]) == 0
    assert len(scored) == sum(len(trace.token_ids) for trace in scored.traces)


def test_merging_shards_is_scoring_them_together() -> None:
    """However the traces are split and whatever the chunks; the columns and the bets are the same."""
    traces = decoded(6)
    whole = score(traces, target=TARGET, draft=DRAFT)
    for cut in (1, 7, 12):
        parts = [score(part, target=TARGET, draft=DRAFT) for part in (traces[:cut], traces[cut:])]
        merged = ScoredTraces().merge(parts[0]).merge(parts[1])
        assert merged.traces == whole.traces
        assert set(merged.columns) == set(whole.columns)
        for name in whole.columns:
            np.testing.assert_allclose(merged[name], whole[name], rtol=0, atol=1e-12)
        for name, ratios in whole.fault_ratios.items():
            np.testing.assert_allclose(merged.fault_ratios[name], ratios, rtol=1e-9)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that holds few logits at a time gives the same scores."""
    traces = decoded(6)
    whole = score(traces, target=TARGET, draft=DRAFT)
    monkeypatch.setattr(scoring, "_ELEMENTS_AT_ONCE", 60)
    monkeypatch.setattr(scoring, "_ROWS_AT_ONCE", 4)
    chunked = score(traces, target=TARGET, draft=DRAFT)
    for name in whole.columns:
        np.testing.assert_allclose(chunked[name], whole[name], rtol=0, atol=1e-12)


def test_a_mask_keeps_the_meaning_of_trace_numbers() -> None:
    """Prompts and domains of the kept tokens are still their own."""
    scored = score(decoded(2), target=TARGET, draft=DRAFT)
    last = scored.where(scored["trace"] == len(scored.traces) - 1)
    assert len(last) == 3
    assert set(last.prompts()) == {scored.prompts()[-1]}
    names, numbers = last.domains()
    assert [names[number] for number in numbers] == [""] * 3


def silent(trace: DecodeTrace) -> DecodeTrace:
    """The same request, answered with nothing."""
    return replace(trace, token_ids=(), steps=())


def test_nothing_scored_is_empty_and_loses_nothing() -> None:
    """A round without traces, or whose texts are all empty, leaves the evidence of the others whole."""
    assert len(score([], target=TARGET)) == 0
    scored = score(decoded(1), target=TARGET, draft=DRAFT)
    empty = score([silent(decoded(1)[0])], target=TARGET, draft=DRAFT)
    assert len(empty) == 0
    assert len(empty.traces) == 1
    for merged in (
        ScoredTraces().merge(scored),
        scored.merge(ScoredTraces()),
        scored.merge(empty),
        empty.merge(scored),
    ):
        assert len(merged) == len(scored)
        assert merged.fault_ratios
        assert [merged.traces[int(number)] for number in merged["trace"]] == [
            scored.traces[int(number)] for number in scored["trace"]
        ]


def test_texts_without_tokens_among_others_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand, and even where they would fill a chunk."""
    traces = decoded(1)
    mixed = [silent(traces[0]), silent(traces[0]), traces[0], silent(traces[1]), traces[1]]
    monkeypatch.setattr(scoring, "_ELEMENTS_AT_ONCE", 1)
    scored = score(mixed, target=TARGET, draft=DRAFT)
    assert scored["trace"].tolist() == [2, 2, 2, 4, 4, 4]
    assert scored["token"].tolist() == [*traces[0].token_ids, *traces[1].token_ids]
