"""Stages of chain rejection: each is fair where the decoder is healthy, and the wrong one is the one that is named."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import stats

from specverify.checks.evidence import STAGES, e_process
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import DraftModel
from specverify.faults import find_fault
from specverify.models.table import random_table
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, FinishReason, SamplingParams
from specverify.scoring import ScoredTraces, score
from specverify.stages import STAGE_FAULTS, Role, drafts_and_roles, stage_ratios

VOCAB_SIZE = 6
TARGET = random_table(VOCAB_SIZE, 6, seed=0)
DRAFT = random_table(VOCAB_SIZE, 6, seed=1)


@lru_cache
def scored(fault: str = "") -> ScoredTraces:
    """A thousand texts of a few ragged requests, by the healthy decoder or a faulty one."""
    params = SamplingParams(max_new_tokens=4, eos_token_ids=(5,))
    rows = [
        Row(DecodeRequest(id=str(seed), prompt_ids=prompt, params=params, seed=seed), sample)
        for seed, prompt in enumerate([(0, 1), (2,)])
        for sample in range(500)
    ]
    decoder = Decoder(target=TARGET, drafter=DraftModel(DRAFT, VOCAB_SIZE), num_speculative_tokens=2)
    decoder = find_fault(fault).apply(decoder) if fault else decoder
    return score(list(speculative(decoder, rows)), target=TARGET, draft=DRAFT, stages=True)


def test_roles_add_up_with_the_counters():
    """Every accepted draft is emitted as it was; a step ends with at most one token of the target's own."""
    traces = scored().traces
    for trace in traces:
        known = drafts_and_roles(trace)
        accepted = [place for place, (_, role) in enumerate(known) if role is Role.ACCEPTED]
        assert len(accepted) == sum(step.num_accepted_tokens for step in trace.steps)
        assert all(known[place][0] == trace.token_ids[place] for place in accepted)
        own = sum(role in {Role.REPLACEMENT, Role.BONUS} for _, role in known)
        assert own <= sum(step.num_draft_tokens > 0 for step in trace.steps)
    met = {role for trace in traces for _, role in drafts_and_roles(trace)}
    assert met == set(Role)


def test_an_engine_that_shows_no_drafts_has_no_stages():
    """Counts alone say nothing of what was drafted."""
    request = DecodeRequest(id="r", prompt_ids=(0,), params=SamplingParams(max_new_tokens=3))
    trace = DecodeTrace(
        request=request, sample=0, token_ids=(1, 2, 3), finish=FinishReason.LENGTH, steps=(DecodeStep(2, 2, 3),)
    )
    assert drafts_and_roles(trace) == [(-1, Role.UNKNOWN)] * 3
    columns = score([trace], target=TARGET, draft=DRAFT, stages=True)
    assert all(np.isnan(columns[name]).all() for name in (*STAGES, "accept_prob"))


@pytest.mark.parametrize("column", STAGES)
def test_every_stage_of_a_healthy_decoder_is_uniform(column: str):
    """By KS, whose p-value is exact; at one seed, so the limit is a plain one."""
    values = scored()[column]
    values = values[~np.isnan(values)]
    assert len(values) > 150
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_drafts_are_accepted_as_often_as_the_ratio_says():
    """Within four standard errors."""
    prob = scored()["accept_prob"]
    seen = ~np.isnan(prob)
    accepted = scored()["role"][seen] == Role.ACCEPTED
    error = np.sqrt((prob[seen] * (1 - prob[seen])).sum())
    assert abs(accepted.sum() - prob[seen].sum()) < 4 * error


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("residual-from-target", STAGES["pit_residual"]),
        ("residual-wrong-row", STAGES["pit_residual"]),
        ("residual-not-clamped", STAGES["pit_residual"]),
        ("bonus-from-draft", STAGES["pit_bonus"]),
        ("draft-temperature", STAGES["pit_draft"]),
        ("ratio-square-root", "drafts accepted more often than min(1, p/q)"),
    ],
)
def test_the_stage_that_is_wrong_is_named(fault: str, named: str):
    """With evidence, and no other stage is blamed nearly as much."""
    process = e_process(scored(fault))
    assert process.log10_e > 3
    stages = {name: log10_e for name, log10_e in process.components.items() if name in {*STAGES.values(), named}}
    assert max(stages, key=stages.__getitem__) == named


def test_a_replacement_drawn_with_used_noise_shows_in_the_order_of_ids():
    """The uniform that rejected lies above the ratio, and so does the replacement that it draws."""
    values = scored("accept-noise-in-residual")["pit_residual_id"]
    assert stats.kstest(values[~np.isnan(values)], "uniform").pvalue < 1e-4


def test_a_healthy_decoder_leaves_no_evidence():
    """The same bets, no fault."""
    assert e_process(scored()).log10_e < 2


def rows(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Laws of six ids at eight contexts."""
    generator = torch.Generator().manual_seed(9)
    p, q = torch.rand(2, 8, VOCAB_SIZE, generator=generator, dtype=torch.float64) ** 2
    if kind == "zeros":
        p[:, 1], q[:, 2] = 0, 0
    if kind == "equal":
        q = p.clone()
    if kind == "disjoint":
        p[:, :3], q[:, 3:] = 0, 0
    if kind == "one-hot":
        p, q = p**30, q**30
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def ratios_of(p: torch.Tensor, q: torch.Tensor, token: int, drafted: int, role: Role) -> dict[str, torch.Tensor]:
    """The bets where every context draws the same."""
    columns = {"token": token, "drafted": drafted, "role": role}
    where = {name: torch.full((len(p),), value) for name, value in columns.items()}
    return stage_ratios(p, q, {**where, "entropy": torch.special.entr(p).sum(-1)})


@pytest.mark.parametrize("kind", ["random", "zeros", "equal", "disjoint", "one-hot"])
def test_every_bet_on_a_draw_is_fair(kind: str):
    """Averaged over the draw that it bets on, given everything before it, no bet pays more than was put in."""
    p, q = rows(kind)
    ids = range(VOCAB_SIZE)
    accept = torch.where(q > 0, p / q, 0).clamp(max=1)
    mass = (p - q).clamp(min=0)
    law = torch.where(mass.sum(-1, keepdim=True) > 0, mass / mass.sum(-1, keepdim=True).clamp(min=1e-300), p)
    met = {name: torch.zeros(len(p), dtype=torch.float64) for name in STAGE_FAULTS}
    for draft in ids:
        taken, refused = (ratios_of(p, q, draft, draft, role) for role in (Role.ACCEPTED, Role.UNKNOWN))
        for name in STAGE_FAULTS[:3]:
            met[name] += q[:, draft] * taken[name]
        for name in STAGE_FAULTS[3:7]:
            paid = accept[:, draft] * taken[name] + (1 - accept[:, draft]) * refused[name]
            assert not bool((paid[q[:, draft] > 0] > 1 + 1e-5).any()), name
        possible = (q[:, draft] > 0) & (accept[:, draft] < 1)
        for name in STAGE_FAULTS[7:12]:
            paid = sum(law[:, token] * ratios_of(p, q, token, draft, Role.REPLACEMENT)[name] for token in ids)
            assert not bool((paid[possible] > 1 + 1e-9).any()), name
        met[STAGE_FAULTS[12]] += p[:, draft] * ratios_of(p, q, draft, -1, Role.BONUS)[STAGE_FAULTS[12]]
    for name in (*STAGE_FAULTS[:3], STAGE_FAULTS[12]):
        assert float(met[name].max()) <= 1 + 1e-9, name


def test_what_a_draw_does_not_concern_is_no_bet():
    """Tokens whose step shows no drafts."""
    p, q = rows("random")
    for name, ratio in ratios_of(p, q, 0, -1, Role.UNKNOWN).items():
        assert bool((ratio == 1).all()), name


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("residual-from-target", "replacement of a rejected draft drawn from the target"),
        ("residual-not-clamped", "replacement of a rejected draft drawn from |p - q|"),
        ("accept-noise-in-residual", "replacement of a rejected draft drawn with the noise that rejected it"),
        ("draft-noise-in-residual", "replacement of a rejected draft drawn with the noise that drew it"),
        ("draft-noise-in-accept", "drafts accepted with the noise that drew them"),
        ("draft-temperature", "drafts drawn from a sharper law than the reported one"),
    ],
)
def test_the_fault_of_a_draw_is_named(fault: str, named: str):
    """Of all that is bet on, it has won most."""
    assert e_process(scored(fault)).likeliest == named
