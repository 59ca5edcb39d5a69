"""What has been said so far: the state that target, drafter and stop rule share."""

from __future__ import annotations

import pytest
import torch

from specverify.context import Context, Row, pad_vocab
from specverify.errors import InternalError
from specverify.records import DecodeRequest, DecodeStep, FinishReason, SamplingParams

PROMPTS = ((1, 2, 3), (4,), (5, 6))


def context(*, limit: int = 4, **options: object) -> Context:
    """Three rows of different lengths, nothing said yet."""
    params = SamplingParams(max_new_tokens=limit, stop_strings=("bc",))
    rows = [
        Row(DecodeRequest(id=str(seed), prompt_ids=ids, params=params, seed=seed), 0)
        for seed, ids in enumerate(PROMPTS)
    ]
    return Context.start(rows, torch.device("cpu"), **options)


def committed(
    state: Context, emitted: list[list[int]], cuts: list[tuple[int, FinishReason | None]]
) -> tuple[list, list]:
    """Traces that ended, and rows that go on."""
    traces = []
    steps = [DecodeStep(len(ids) - 1, kept - 1, kept) for ids, (kept, _) in zip(emitted, cuts, strict=True)]
    step = state.commit(torch.tensor(emitted), cuts, steps)
    while True:
        try:
            traces.append(next(step))
        except StopIteration as stop:
            return traces, stop.value.tolist()


def test_rows_emit_different_numbers_of_tokens() -> None:
    """Each row grows by its own kept tokens; what is beyond a cut is never written."""
    state = context()
    traces, going_on = committed(state, [[7, 8, 9], [7, 8, 9], [7, 8, 9]], [(1, None), (3, None), (2, None)])
    assert traces == []
    assert going_on == [0, 1, 2]
    assert [state.emitted(row) for row in range(3)] == [[7], [7, 8, 9], [7, 8]]
    assert state.last_tokens().tolist() == [[7], [9], [8]]
    assert state.lengths.tolist() == [4, 4, 4]


def test_finished_rows_leave_with_their_trace() -> None:
    """A trace holds the emitted ids, the reason and all steps; the others keep their own tokens and choices."""
    state = context()
    committed(state, [[7], [8], [9]], [(1, None)] * 3)
    traces, going_on = committed(state, [[1, 2], [3, 4], [5, 6]], [(2, None), (1, FinishReason.EOS), (2, None)])
    assert [trace.token_ids for trace in traces] == [(8, 3)]
    assert traces[0].finish is FinishReason.EOS
    assert traces[0].steps == (DecodeStep(0, 0, 1), DecodeStep(1, 0, 1))
    state.select(torch.tensor(going_on))
    assert [state.emitted(row) for row in range(2)] == [[7, 1, 2], [9, 5, 6]]
    assert [row.request.id for row in state.rows] == ["0", "2"]
    assert state.choices.seed.tolist() == [0, 2]
    assert state.choices.position.tolist() == [3, 3]
    assert state.choices.step.tolist() == [2, 2]


def test_drafts_stand_right_behind_each_rows_own_tokens() -> None:
    """Sampling parameters must see them there, whatever the padding."""
    state = context(limit=1)
    seen = state.with_drafts(torch.tensor([[7, 8], [9, 10], [11, 12]]))
    assert [seen[row, : int(state.lengths[row]) + 2].tolist() for row in range(3)] == [
        [1, 2, 3, 7, 8], [4, 9, 10], [5, 6, 11, 12],
    ]  # fmt: skip
    assert torch.equal(state.with_drafts(torch.zeros(3, 0, dtype=torch.int64)), state.token_ids)


def test_catching_up_gives_what_a_session_lacks() -> None:
    """One row lacks three tokens, one lacks one, one lacks two; right-padded."""
    state = context()
    block, missing = state.catch_up(torch.tensor([0, 0, 1]))
    assert missing.tolist() == [3, 1, 1]
    assert [ids[:size] for ids, size in zip(block.tolist(), missing.tolist(), strict=True)] == [[1, 2, 3], [4], [6]]


def test_stop_strings_may_straddle_tokens_and_steps() -> None:
    """The text since the prompt counts, with the new ids; the prompt's own text does not."""
    letters = {7: "ab", 8: "cd", 9: "b", 1: "bc"}
    state = context(detokenize=lambda ids: "".join(letters.get(token, "?") for token in ids))
    assert not state.completes_stop_string(0, [8])
    committed(state, [[7], [9], [1]], [(1, None)] * 3)
    assert state.completes_stop_string(0, [8])
    assert not state.completes_stop_string(0, [])
    assert state.completes_stop_string(2, [])


def test_stop_strings_need_a_detokenizer() -> None:
    """An engine that can't look at text must not pretend to."""
    with pytest.raises(InternalError, match="detokenizer"):
        context().completes_stop_string(0, [1])


def test_unlike_vocabularies_are_padded_with_impossible_ids() -> None:
    """Ids that a model does not have get no probability; rows that the target does not have are cut."""
    logits = torch.zeros(1, 1, 3)
    assert pad_vocab(logits, 5).softmax(-1)[0, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert pad_vocab(logits, 2).shape[-1] == 2
