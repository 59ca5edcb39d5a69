"""Steps that contradict their own tokens."""

from __future__ import annotations

import pytest

from specverify.checks.counters import impossible_counters
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, FinishReason


def trace(*steps: tuple[int, int, int], length: int | None = None) -> DecodeTrace:
    """A text of as many tokens as its steps emit, or of another length."""
    emitted = sum(emitted for _, _, emitted in steps) if length is None else length
    return DecodeTrace(
        request=DecodeRequest(id="asked", prompt_ids=(0,)),
        sample=2,
        token_ids=(0,) * emitted,
        finish=FinishReason.EOS,
        steps=tuple(DecodeStep(*step) for step in steps),
    )


@pytest.mark.parametrize(
    "right",
    [
        trace((3, 1, 2), (3, 3, 4), (0, 0, 1)),
        trace((3, 2, 2)),  # a stop fell on the second draft
        trace((3, 0, 1), (3, 3, 3), (2, 0, 1)),  # an engine without a bonus
        trace(length=5),  # an engine that tells no steps
    ],
)
def test_what_adds_up_is_let_pass(right):
    """Each way in which a step may end."""
    assert impossible_counters([right]) == ()


@pytest.mark.parametrize(
    ("wrong", "said", "step"),
    [
        (trace((3, 3, 4), (3, 4, 4)), "no more can be accepted than was drafted", 1),
        (trace((3, -1, 1)), "no more can be accepted than was drafted", 0),
        (trace((3, 3, 2)), "doesn't count", 0),
        (trace((3, 1, 3)), "the target adds one token, not 2", 0),
        (trace((3, 2, 2), (3, 0, 1)), "after a rejection the target must add a token", 0),
    ],
)
def test_the_first_contradiction_is_named(wrong, said, step):
    """What, and in which step of which sample."""
    (found,) = impossible_counters([wrong])
    assert said in found.text
    assert found.place == f"asked, sample 2, step {step}"


def test_a_sum_that_is_not_the_text_is_named():
    """Tokens that no step emitted."""
    (found,) = impossible_counters([trace((3, 1, 2), length=3)])
    assert found.text == "its steps emit 2 tokens and the text has 3"


def test_a_few_are_named():
    """Not one a trace."""
    assert len(impossible_counters([trace((1, 2, 2))] * 100)) == 5
