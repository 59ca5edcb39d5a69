"""Counters recomputed from steps, under the names and meanings of everyone's dashboards."""

from __future__ import annotations

import math

import pytest

from specverify.records import (
    DecodeRequest,
    DecodeStep,
    DecodeTrace,
    FinishReason,
    SamplingParams,
    Verdict,
    count,
    worst,
)


def trace(*steps: tuple[int, int, int]) -> DecodeTrace:
    """A trace of (drafted, accepted, emitted) steps."""
    request = DecodeRequest(id="r", prompt_ids=(1,))
    emitted = sum(step[2] for step in steps)
    return DecodeTrace(
        request=request, sample=0, token_ids=(0,) * emitted, finish=FinishReason.LENGTH,
        steps=tuple(DecodeStep(*step) for step in steps),
    )  # fmt: skip


def test_the_bonus_is_not_an_accepted_token() -> None:
    """Three drafts all accepted emit four tokens, of which three are accepted."""
    counters = count([trace((3, 3, 4))])
    assert counters.num_accepted_tokens == 3
    assert counters.acceptance_rate == 1
    assert counters.mean_acceptance_length == 4


def test_steps_without_drafts_are_not_counted() -> None:
    """A skipped draft is neither a draft nor a rejection."""
    counters = count([trace((2, 1, 2), (0, 0, 1)), trace((0, 0, 1))])
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (1, 2, 1)


def test_positions_count_steps_that_accepted_that_far() -> None:
    """Position i counts the steps that accepted more than i tokens, up to the longest block."""
    counters = count([trace((3, 3, 4), (3, 1, 2), (2, 0, 1)), trace((3, 2, 3))])
    assert counters.num_accepted_tokens_per_pos == (3, 2, 1)
    assert sum(counters.num_accepted_tokens_per_pos) == counters.num_accepted_tokens
    assert counters.acceptance_rate == pytest.approx(6 / 11)
    assert counters.mean_acceptance_length == pytest.approx(1 + 6 / 4)


def test_a_drafter_that_is_never_accepted_reads_zero() -> None:
    """Zero is a measurement; one token a step is its acceptance length."""
    counters = count([trace((3, 0, 1), (3, 0, 1))])
    assert counters.acceptance_rate == 0
    assert counters.mean_acceptance_length == 1
    assert counters.num_accepted_tokens_per_pos == (0, 0, 0)


def test_nothing_drafted_is_not_a_number() -> None:
    """No rate is claimed where nothing was drafted."""
    counters = count([trace((0, 0, 1))])
    assert math.isnan(counters.acceptance_rate)
    assert math.isnan(counters.mean_acceptance_length)


@pytest.mark.parametrize(
    ("changed", "depends"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, False),
        ({"banned_token_ids": ((4,),)}, False),
        ({"banned_token_ids": ((4, 5),)}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_prefix_dependence_is_told(changed: dict[str, object], depends: bool) -> None:
    """Only parameters that read the tokens before them make the law depend on the prefix."""
    assert SamplingParams(**changed).prefix_dependent is depends


def test_the_verdict_of_a_whole_is_its_worst_part() -> None:
    """FAIL over INCONCLUSIVE over PASS; what did not run says nothing."""
    passed, failed, thin, absent = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_RUN
    assert worst([passed, thin, failed, absent]) is failed
    assert worst([passed, thin, absent]) is thin
    assert worst([absent, passed]) is passed
    assert worst([absent]) is absent
    assert worst([]) is absent
