"""The stopping check passes a decoder that stops rightly, and fails each wrong way that engines have shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from specverify.checks.stopping import _judged, stopping
from specverify.decoding import first_stop
from specverify.drafting import DraftModel, NoDraft
from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.reference import ReferenceEngine
from specverify.faults import find_fault
from specverify.models.hashed import HashedModel
from specverify.plan import Plan
from specverify.records import DecodeRequest, DecodeTrace, FinishReason, SamplingParams, Verdict
from tests.unit.checks.hashed import VOCAB_SIZE, answered, concluded, detokenize, subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.decoding import Decoder
    from specverify.records import CheckResult

PLAN = Plan()


@dataclass(frozen=True)
class Changed:
    """An engine that changes the answers of another one, or tells less about itself."""

    inner: ReferenceEngine
    change: Callable[[DecodeTrace], DecodeTrace] = lambda trace: trace
    capabilities: frozenset[Capability] = frozenset(Capability)
    parameters: frozenset[str] = ALL_PARAMETERS
    name: str = "changed"

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """The inner engine's answers, changed."""
        return map(self.change, self.inner.decode(requests))


def with_decoder(change: Callable[[Decoder], Decoder]) -> CheckResult:
    """The verdict on a decoder with one part changed."""
    decoder = subject().decoder
    assert decoder is not None
    return concluded(stopping, subject(change(decoder)), PLAN)


def with_answers(change: Callable[[DecodeTrace], DecodeTrace]) -> CheckResult:
    """The verdict on an engine that changes the reference decoder's answers."""
    engine = subject().engine
    assert isinstance(engine, ReferenceEngine)
    return concluded(stopping, subject(engine=Changed(engine, change)), PLAN)


def test_a_healthy_decoder_passes_with_every_offset_covered() -> None:
    """Stops fell on each accepted draft of a block and on the target's own token, and all ended rightly."""
    result = concluded(stopping, subject(), PLAN)
    assert result.verdict is Verdict.PASS, result.summary
    for place in ("offset_0", "offset_1", "offset_2", "own_token"):
        assert result.measurements[f"num_stops_at_{place}"] >= 3
    assert result.measurements["num_not_comparable"] == 0
    assert result.measurements["num_stop_string_texts"] > 0


def test_it_is_cheap() -> None:
    """Two rounds, at most 250 short rows, whatever the number of speculative tokens."""
    for drafts in (1, 3, 8):
        rounds = list(stopping.rounds(subject(), replace(PLAN, num_speculative_tokens=drafts)))
        assert len(rounds) == 2
        assert sum(len(requests) for requests in rounds) <= 250
        assert max(request.params.max_new_tokens for requests in rounds for request in requests) <= 20


def test_every_kind_of_stop_is_asked_at_every_offset() -> None:
    """EOS, stop ids and stop strings each fall on each accepted draft of a block."""
    offsets: dict[str, set[int]] = {"eos": set(), "stop": set(), "string": set()}
    for trace in answered(stopping, subject(), PLAN).traces:
        kind = trace.request.id.split("/")[1].split("@")[0]
        last = trace.steps[-1]
        if kind in offsets and last.num_emitted_tokens == last.num_accepted_tokens:
            offsets[kind].add(last.num_emitted_tokens - 1)
    assert all(seen == {0, 1, 2} for seen in offsets.values()), offsets


@pytest.mark.parametrize("name", ["eos-inside-block-ignored", "one-past-limit", "penalties-ignored"])
def test_planted_faults_fail(name: str) -> None:
    """A stop inside a block that is overlooked, a limit that is overstepped, a minimum length that is dropped."""
    result = with_decoder(find_fault(name).apply)
    assert result.verdict is Verdict.FAIL
    assert "expected ids" in result.findings[0].text
    assert "emitted" in result.findings[0].text


@pytest.mark.parametrize(
    ("ends", "right"),
    [
        ({"stop_strings": ("ab",), "max_new_tokens": 2}, True),
        ({"stop_strings": ("ab",), "max_new_tokens": 3}, False),
        ({"stop_token_ids": (1,), "max_new_tokens": 2}, False),
        ({"eos_token_ids": (1,), "max_new_tokens": 2}, False),
    ],
)
def test_cut_is_true_of_a_stop_string_that_ends_at_the_limit_and_of_no_other_stop(ends, right) -> None:
    """OpenVINO calls it so, without speculation too."""
    request = DecodeRequest(id="r", prompt_ids=(3,), params=SamplingParams(temperature=0, **ends))
    trace = DecodeTrace(request=request, sample=0, token_ids=(0, 1), finish=FinishReason.LENGTH)
    (judged,) = _judged([trace], lambda ids: "".join("abcd"[token] for token in ids))
    assert judged.right is right


def test_stop_strings_that_are_ignored_fail() -> None:
    """An engine that takes stop strings and never looks for them."""

    def deaf(context, emitted, num_emitted):
        context.detokenize = lambda _: ""
        return first_stop(context, emitted, num_emitted)

    result = with_decoder(lambda decoder: replace(decoder, stop=deaf))
    assert result.verdict is Verdict.FAIL
    assert "string@" in result.findings[0].place


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: replace(trace, finish=FinishReason.LENGTH),
        lambda trace: replace(trace, token_ids=trace.token_ids[:-1] or trace.token_ids, finish=trace.finish),
        lambda trace: replace(trace, token_ids=(*trace.token_ids, 3)) if trace.finish is FinishReason.EOS else trace,
    ],
    ids=["wrong reason", "one token short", "a token after EOS"],
)
def test_answers_that_end_wrongly_fail(change: Callable[[DecodeTrace], DecodeTrace]) -> None:
    """The reason is part of the answer, the stop's own token is emitted, and nothing comes after an EOS."""
    assert with_answers(change).verdict is Verdict.FAIL


def test_a_finding_names_prompt_offset_and_ids() -> None:
    """Enough to see it again: which prompt, which offset of which block, what was expected and what came."""
    finding = with_decoder(find_fault("eos-inside-block-ignored").apply).findings[0]
    assert finding.place.startswith(("eos@", "stop@", "string@"))
    assert "/p" in finding.place
    assert "offset" in finding.place
    assert "must end with" in finding.text


def test_another_text_is_not_a_stopping_fault() -> None:
    """Texts that leave the target's own are counted and left to the greedy check, as long as they end rightly."""
    result = with_decoder(find_fault("always-accept").apply)
    assert result.verdict is not Verdict.FAIL
    assert result.measurements["num_not_comparable"] > 0
    assert any("leave the target-only text" in finding.text for finding in result.findings)


def test_nothing_drafted_is_inconclusive() -> None:
    """Without drafts no stop falls inside a block, and the verdict names the offsets that were not tested."""
    result = with_decoder(lambda decoder: replace(decoder, drafter=NoDraft(VOCAB_SIZE)))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "offset 0, offset 1, offset 2" in result.summary


def test_a_draft_that_never_agrees_is_brought_to_agree() -> None:
    """Offsets that no text reaches are asked again with all ids banned but a few, where any draft agrees often."""
    poor = HashedModel("poor", seed=7)

    def with_poor_draft(decoder: Decoder) -> Decoder:
        return replace(decoder, drafter=DraftModel(poor, VOCAB_SIZE))

    decoder = subject().decoder
    assert decoder is not None
    asked = answered(stopping, subject(with_poor_draft(decoder)), PLAN).traces
    assert any(trace.request.params.banned_token_ids for trace in asked)
    result = with_decoder(with_poor_draft)
    assert result.measurements["num_wrong_endings"] == 0
    assert result.verdict is Verdict.PASS, result.summary


def test_an_engine_without_steps_is_judged_by_its_tokens() -> None:
    """Offsets are unknown then, and the summary says so; a wrong ending still fails."""
    silent = with_answers(lambda trace: replace(trace, steps=()))
    assert silent.verdict is Verdict.PASS
    assert "unknown offsets" in silent.summary
    longer = with_answers(lambda trace: replace(trace, steps=(), token_ids=(*trace.token_ids, 3)))
    assert longer.verdict is Verdict.FAIL


def test_stop_strings_are_left_out_where_the_engine_takes_none() -> None:
    """What an engine can't be asked is not asked."""
    engine = subject().engine
    assert isinstance(engine, ReferenceEngine)
    deaf = Changed(engine, capabilities=frozenset(Capability) - {Capability.STOP_STRINGS})
    result = concluded(stopping, subject(engine=deaf), PLAN)
    assert result.verdict is Verdict.PASS
    assert result.measurements["num_stop_string_texts"] == 0


def test_no_room_for_a_text_is_inconclusive() -> None:
    """Prompts that fill the target's positions leave nothing to ask."""
    full = subject()
    result = concluded(stopping, replace(full, prompts=(replace(full.prompts[0], token_ids=(1,) * 128),)), PLAN)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert detokenize([0]) == "ax"
