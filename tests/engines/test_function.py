"""The smallest engine of a user, and what is said when it answers something else."""

from __future__ import annotations

import pytest

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.function import FunctionEngine, decodes
from specverify.errors import SubjectError
from specverify.records import DecodeRequest, FinishReason, SamplingParams
from tests.engines import ten_lines

REQUEST = DecodeRequest(
    id="r", prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=6, eos_token_ids=(0,)), num_samples=2
)


def test_ten_lines_are_an_engine():
    """Samples, seeds, and why each text ended."""
    engine = FunctionEngine(ten_lines.decode)
    traces = list(engine.decode([REQUEST]))
    assert [trace.sample for trace in traces] == [0, 1]
    assert all((trace.finish is FinishReason.EOS) == (trace.token_ids[-1] == 0) for trace in traces)
    assert traces == list(engine.decode([REQUEST]))


def test_what_it_names_is_what_it_honours():
    """The rest is never asked; with `**sampling` it promises all."""
    assert FunctionEngine(ten_lines.decode).parameters == {"temperature", "eos_token_ids"}
    assert FunctionEngine(ten_lines.everything).parameters == ALL_PARAMETERS
    assert FunctionEngine(ten_lines.decode).capabilities == {Capability.SEED}


def test_second_function_is_the_off_arm():
    """A request without speculation goes there."""
    engine = FunctionEngine(ten_lines.decode, off=lambda prompt_ids, n, **_: [[7]] * n)
    assert Capability.SPECULATION_SWITCH in engine.capabilities
    off = DecodeRequest(id="off", prompt_ids=(1,), speculation=False)
    assert [trace.token_ids for trace in engine.decode([off])] == [(7,)]


def test_a_function_may_tell_what_it_drafted():
    """As a dict of the dashboards' names; anything else is one sentence."""

    def counted(prompt_ids, n, max_new_tokens, seed):
        return [[1]] * n

    counted.counters = lambda: {
        "num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "num_accepted_tokens_per_pos": [2, 1, 0],
    }  # fmt: skip
    engine = FunctionEngine(counted)
    assert Capability.COUNTERS in engine.capabilities
    assert engine.counters().num_accepted_tokens_per_pos == (2, 1, 0)
    counted.counters = lambda: 3
    with pytest.raises(SubjectError, match="a dict of num_drafts, num_draft_tokens"):
        engine.counters()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (ten_lines.text, "returned a str for r; a list of 2 lists of ints was wanted"),
        (ten_lines.too_few, "returned 1 texts for r"),
        (ten_lines.strings, "as one text of r"),
        (ten_lines.raises, "raised ZeroDivisionError for r: no slots"),
    ],
)
def test_wrong_answer_is_one_sentence(function, said):
    """A finding that names the request, never a traceback."""
    with pytest.raises(SubjectError, match=said):
        list(FunctionEngine(function, name="mine").decode([REQUEST]))


def test_a_function_that_decodes_is_told_by_its_first_parameter():
    """Everything else is taken for a factory."""
    assert decodes(ten_lines.decode)
    assert not decodes(ten_lines.from_settings)
    assert not decodes(print)
