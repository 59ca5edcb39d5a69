"""stopping: a decode is the text that the target alone would say for ever, cut after the first thing that ends it.

EOS, stop id, stop string (also one that begins in an earlier step) and length limit, at every offset of every block, for
accepted drafts, the token after a rejection, and the bonus. What the text is cut to is found by going through it token by
token; the reason is that of the first ending, and of several at one token EOS, stop, length in that order. Drafts after
the end are neither emitted nor counted.

Faults that it must catch: `eos-inside-block-ignored`, `one-past-limit`, a text that is cut before what ends it, stop
strings looked for in the block alone, the reason of a limit that hides a stop, a stop id taken for an EOS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from properties.strategies import Ending, endings
from specverify.context import Context, Row
from specverify.decoding import Decoder, autoregressive, first_stop, speculative
from specverify.drafting import NoDraft, ScriptedDrafts
from specverify.faults import find_fault
from specverify.models.table import TableModel
from specverify.records import DecodeRequest, DecodeTrace, FinishReason
from specverify.verification.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.decoding import Stop

VOCAB_SIZE = 4
LETTERS = "abcd"
PROMPT = (0,)
SEARCH = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True, deadline=None)

BATCHES = st.lists(endings(VOCAB_SIZE), min_size=1, max_size=3)
"""Rows that end at different times."""


def letters(ids: Sequence[int]) -> str:
    """One letter a token."""
    return "".join(LETTERS[token] for token in ids)


def cut(ending: Ending) -> tuple[tuple[int, ...], FinishReason]:
    """The text up to the first token that ends it, and why it ends there."""
    params = ending.params
    for end in range(1, len(ending.text) + 1):
        said = ending.text[:end]
        if said[-1] in params.eos_token_ids:
            return said, FinishReason.EOS
        if said[-1] in params.stop_token_ids or any(string in letters(said) for string in params.stop_strings):
            return said, FinishReason.STOP
        if end == params.max_new_tokens:
            return said, FinishReason.LENGTH
    raise AssertionError(ending)


class Recited(TableModel):
    """A target that says a fixed text, whatever was said before: row n is a point mass on its n-th token."""

    def __init__(self, text: Sequence[int]) -> None:
        certain = torch.eye(VOCAB_SIZE, dtype=torch.float64).log()
        said = [0, *text]
        super().__init__(
            tuple(
                certain[said[min(length, len(text))]].expand(VOCAB_SIZE**length, -1) for length in range(len(text) + 2)
            )
        )


def decoder_of(ending: Ending, rule: str, stop: Stop = first_stop) -> Decoder:
    """The target recites; the draft is right where the ending says so, and wrong elsewhere."""

    def guess(tokens: Sequence[int], step: int) -> list[int]:
        del step
        begun = len(tokens) - len(PROMPT)
        ahead = zip(ending.text[begun:], ending.guessed[begun:], strict=True)
        return [token if right else (token + 1) % VOCAB_SIZE for token, right in ahead]

    return Decoder(
        target=Recited(ending.text),
        drafter=ScriptedDrafts(guess, VOCAB_SIZE),
        rule=RULES[rule].rule,
        num_speculative_tokens=ending.num_speculative_tokens,
        stop=stop,
        detokenize=letters,
    )


def request_of(ending: Ending) -> DecodeRequest:
    """At temperature 0, so that the text is the recited one."""
    return DecodeRequest(id="ending", prompt_ids=PROMPT, params=ending.params)


def is_cut_where_it_must(trace: DecodeTrace, ending: Ending) -> None:
    """Text, reason, and steps that add up to it."""
    text, reason = cut(ending)
    assert trace.token_ids == text, f"said {letters(trace.token_ids)}, expected {letters(text)}"
    assert trace.finish is reason, f"ended with {trace.finish}, expected {reason}"
    assert sum(step.num_emitted_tokens for step in trace.steps) == len(text), "steps don't add up to the text"
    assert all(step.num_accepted_tokens <= step.num_emitted_tokens for step in trace.steps), "accepted, not emitted"


def speculation_is_cut_right(rule: str, change: Callable[[Decoder], Decoder], ending: Ending) -> None:
    """A whole speculative decode of one row."""
    [trace] = speculative(change(decoder_of(ending, rule)), [Row(request_of(ending), 0)])
    is_cut_where_it_must(trace, ending)


@pytest.mark.parametrize("rule", ["chain", "match", "greedy"])
@given(ending=endings(VOCAB_SIZE))
def test_decodes_are_cut_after_the_first_ending(rule: str, ending: Ending) -> None:
    """Whatever is drafted, accepted, and in the way."""
    speculation_is_cut_right(rule, lambda decoder: decoder, ending)


@given(ending=endings(VOCAB_SIZE))
def test_the_target_alone_is_cut_there_too(ending: Ending) -> None:
    """So ON and OFF end with the same token for the same reason."""
    decoder = replace(decoder_of(ending, "chain"), drafter=NoDraft(VOCAB_SIZE))
    [trace] = autoregressive(decoder, [Row(request_of(ending), 0)])
    is_cut_where_it_must(trace, ending)


def cuts_a_batch(stop: Stop, rows: list[Ending], offsets: list[int]) -> None:
    """`first_stop` itself: row b has said `offsets[b]` tokens and would emit the rest of its text."""
    begun = [min(offset, len(cut(row)[0]) - 1) for row, offset in zip(rows, offsets, strict=True)]
    context = Context.start([Row(request_of(row), 0) for row in rows], torch.device("cpu"), detokenize=letters)
    rest = [row.text[offset:] for row, offset in zip(rows, begun, strict=True)]
    for index, (row, offset) in enumerate(zip(rows, begun, strict=True)):
        context.token_ids[index, len(PROMPT) : len(PROMPT) + offset] = torch.tensor(
            row.text[:offset], dtype=torch.int64
        )
    context.lengths = context.lengths + torch.tensor(begun)
    width = max(map(len, rest))
    emitted = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in rest])
    for index, (kept, finish) in enumerate(stop(context, emitted, torch.tensor([len(ids) for ids in rest]))):
        text, reason = cut(rows[index])
        assert (kept, finish) == (len(text) - begun[index], reason), f"row {index} keeps {kept} and ends with {finish}"


@given(rows=BATCHES, data=st.data())
def test_first_stop_cuts_each_row_by_itself(rows: list[Ending], data: st.DataObject) -> None:
    """At every offset of a block, in a ragged batch of other endings."""
    offsets = data.draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)), label="offsets")
    cuts_a_batch(first_stop, rows, offsets)


# ------------------------------------------------------------------------------------------------ planted faults


def before_the_end(context: Context, emitted: torch.Tensor, num_emitted: torch.Tensor) -> list:
    """What ends a text by a stop is dropped from it."""
    return [
        (max(kept - 1, 0) if finish is FinishReason.STOP else kept, finish)
        for kept, finish in first_stop(context, emitted, num_emitted)
    ]


def strings_of_the_block_alone(context: Context, emitted: torch.Tensor, num_emitted: torch.Tensor) -> list:
    """A stop string that began in an earlier step isn't found."""
    alone = replace(context, prompt_lengths=context.lengths.clone())
    return first_stop(alone, emitted, num_emitted)


def limit_hides_the_stop(context: Context, emitted: torch.Tensor, num_emitted: torch.Tensor) -> list:
    """A text that stops at its last token is said to be too long."""
    room = (context.limits - context.lengths).tolist()
    cuts = zip(first_stop(context, emitted, num_emitted), room, strict=True)
    return [(kept, FinishReason.LENGTH if finish and kept == most else finish) for (kept, finish), most in cuts]


def stops_are_eos(context: Context, emitted: torch.Tensor, num_emitted: torch.Tensor) -> list:
    """Two reasons are one."""
    cuts = first_stop(context, emitted, num_emitted)
    return [(kept, FinishReason.EOS if finish is FinishReason.STOP else finish) for kept, finish in cuts]


def first_rows_endings(context: Context, emitted: torch.Tensor, num_emitted: torch.Tensor) -> list:
    """All rows end as the first one asks."""
    return first_stop(replace(context, rows=context.rows[:1] * len(context.rows)), emitted, num_emitted)


def stopping_by(stop: Stop) -> Callable[[Decoder], Decoder]:
    """The decoder with another stop."""
    return lambda decoder: replace(decoder, stop=stop)


FAULTS: dict[str, Callable[[Decoder], Decoder]] = {
    "eos-inside-block-ignored": find_fault("eos-inside-block-ignored").apply,
    "one-past-limit": find_fault("one-past-limit").apply,
    "cut-before-the-end": stopping_by(before_the_end),
    "strings-of-the-block-alone": stopping_by(strings_of_the_block_alone),
    "limit-hides-the-stop": stopping_by(limit_hides_the_stop),
    "stop-id-is-eos": stopping_by(stops_are_eos),
}


@pytest.mark.parametrize("name", FAULTS)
def test_property_fails_on_its_faults(name: str) -> None:
    """In whole decodes of single rows."""
    failing = SEARCH(
        given(ending=endings(VOCAB_SIZE))(lambda ending: speculation_is_cut_right("chain", FAULTS[name], ending))
    )
    with pytest.raises(AssertionError, match=r"said|ended"):
        failing()


def test_property_of_a_batch_fails_on_its_fault() -> None:
    """One row's endings for all."""

    def cuts(rows: list[Ending]) -> None:
        cuts_a_batch(first_rows_endings, rows, [0] * len(rows))

    with pytest.raises(AssertionError, match="keeps"):
        SEARCH(given(rows=BATCHES)(cuts))()
