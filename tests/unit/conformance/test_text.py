"""The cells of texts: what they say where a text can be spelt in more than one way, and where a stream tells nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specverify.conformance import laws_of_models
from specverify.conformance.asking import Asking
from specverify.conformance.cells import engine_plan, held
from specverify.conformance.laws import on_subject
from specverify.conformance.text import _log10_e, _mean_log10, _smallest, _spelling, schema, streams
from specverify.engines.fake import fake_engine, letters
from specverify.faults.engine import find_engine_fault
from specverify.records import Verdict
from specverify.statistics.budget import MOST_E_PROCESSES, e_threshold

PLAN = engine_plan("quick")


def subject(engine, detokenize=letters):
    fake = getattr(engine, "inner", engine) if hasattr(engine, "memory") else engine
    laws = laws_of_models(fake.target, fake.draft, eos_token_ids=(0,), seed=17, detokenize=detokenize)
    return on_subject(engine, None, laws, command="specverify qualify")


def merging(token_ids):
    """A tokenizer of which one token is two characters, as users' have them."""
    return "".join("ab" if token == 20 else letters([token]) for token in token_ids)


@pytest.mark.parametrize(
    ("alphabet", "why"),
    [
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef"], ""),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef", "xyz", ""], ""),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef", '"a'], "has the token '\"a' beside"),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef", " a"], "has the token ' a' beside"),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef", " "], "has the token ' ' beside"),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"abcdef", "a"], "has the token 'a' beside"),
        (['"', "[", "]", "{", "}", ",", ":", *"0127", *"bcdef"], "has no token for 'a'"),
    ],
)
def test_a_second_way_to_spell_a_schemas_text_is_seen(alphabet, why):
    """A token of several of its characters, a space, a double, a character that is missing."""
    asked = SimpleNamespace(
        detokenize=lambda ids: "".join(alphabet[token] for token in ids),
        eos_token_ids=(),
        target=SimpleNamespace(vocab_size=len(alphabet)),
    )
    assert why in _spelling(Asking(asked, PLAN, "schema"))[1]
    assert bool(why) is bool(_spelling(Asking(asked, PLAN, "schema"))[1])


def test_with_a_users_tokenizer_a_sound_engine_is_not_failed():
    """What obeys is said, and that the law isn't known."""
    result = held(schema, subject(fake_engine(), merging), PLAN)
    assert result.verdict is Verdict.NOT_RUN
    assert "12 texts obey their schemas" in result.summary
    assert "has the token 'ab'" in result.summary


class Mute:
    """Streams no piece, and tells the whole beside it."""

    def __init__(self, inner):
        self.inner, self.name, self.capabilities, self.parameters = inner, "mute", inner.capabilities, inner.parameters
        self.target, self.draft, self.decode = inner.target, inner.draft, inner.decode

    def tell(self, request, *, stream=False, schema=""):
        return replace(self.inner.tell(request, stream=stream, schema=schema), pieces=())


def test_a_stream_without_a_piece_is_not_what_was_said_whole():
    """Its user reads nothing, whatever stands beside it."""
    result = held(streams, subject(Mute(fake_engine())), PLAN)
    assert result.verdict is Verdict.FAIL
    assert "whole and '' streamed" in result.summary


def test_with_a_users_tokenizer_a_schema_that_is_ignored_still_fails():
    """Obeying needs no law."""
    engine = find_engine_fault("schema-ignored").plant(fake_engine())
    assert held(schema, subject(engine, merging), PLAN).verdict is Verdict.FAIL


@pytest.mark.parametrize("cells", [4, 9])
def test_what_the_law_of_texts_is_said_to_detect_is_proof(cells):
    """With as many texts as the law expects of it; half as far off is none."""
    proof = e_threshold(PLAN.false_fail_rate / 2, MOST_E_PROCESSES)
    distance = _smallest(cells, 128, PLAN.false_fail_rate)

    def found(shift: float) -> float:
        law = np.full(cells, 1 / cells)
        seen = law + shift * np.array([1, *[-1 / (cells - 1)] * (cells - 1)])
        return _mean_log10([_log10_e(list(128 * seen), list(np.log(law))), 0.0, 0.0])

    assert found(distance) > proof > found(distance / 2)
