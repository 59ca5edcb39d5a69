"""Streams and schemas of each dialect: asked for, put together, and found out where they lie."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from specverify.engines.dialect import DIALECTS
from specverify.engines.http_text import TEXTS as TEXTS_OF
from specverify.engines.http_text import events_of
from specverify.engines.openai import opened
from specverify.errors import SubjectError
from specverify.models.calibration import write_calibration_pair
from specverify.records import FinishReason
from tests.engines.fakes import EOS, faking, request_of, settings_of, stream_of, told_of

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, TEXTS = [[4, 5], [6], [7, EOS]], [["a", "b"], ["c"], ["d", ""]]
IDS, SAID = [4, 5, 6, 7, EOS], ["a", "b", "c", "d", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_calibration_pair(tmp_path_factory.mktemp("pair") / "pair").target


def serving(dialect: str, stream: str):
    def answer(path, body):
        streams = "stream" in path or (body or {}).get("stream")
        return 200, stream if streams else told_of(dialect, IDS, SAID, "eos")

    return faking(answer)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_is_put_together_to_what_is_said_whole(dialect, folder):
    with (
        serving(dialect, stream_of(dialect, BLOCKS, TEXTS, "eos")) as fake,
        opened(settings_of(fake, dialect, folder)) as engine,
    ):
        whole, streamed = engine.tell(request_of()), engine.tell(request_of(), stream=True)
    assert (whole.text, whole.token_ids, whole.finish) == ("abcd", tuple(IDS), FinishReason.EOS)
    assert (streamed.text, streamed.token_ids, streamed.finish) == (whole.text, whole.token_ids, whole.finish)
    assert "".join(streamed.pieces) == "abcd"
    assert len(streamed.pieces) > 1
    one, other = fake.bodies
    assert {name: value for name, value in other.items() if name != "stream"} == one


@pytest.mark.parametrize("new_alone", [False, True])
def test_sglangs_events_hold_the_whole_so_far_or_what_is_new(new_alone):
    """Whichever it is, a token that is said again is neither lost nor doubled."""
    said = [([4], "a"), ([4], "a"), ([4, 5], "ab")]
    events, ids, text = [], [], ""
    for new, letters in said:
        ids, text = ids + new, text + letters
        its = (new, letters) if new_alone else (ids, text)
        events.append({"output_ids": its[0], "text": its[1], "meta_info": {"completion_tokens": len(ids)}})
    sglang = TEXTS_OF["sglang"]
    assert sglang.pieces(events) == ["a", "a", "ab"]
    assert sglang.body(events, "aaab")["output_ids"] == [4, 4, 4, 5]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_goes_into_the_field_of_the_dialect(dialect, folder):
    schema = {"enum": [1, 2]}
    with (
        serving(dialect, stream_of(dialect, BLOCKS, TEXTS, "eos")) as fake,
        opened(settings_of(fake, dialect, folder)) as engine,
    ):
        engine.tell(request_of(), schema=json.dumps(schema))
    (body,) = fake.bodies
    found = {
        "vllm": lambda: body["structured_outputs"]["json"],
        "sglang": lambda: json.loads(body["sampling_params"]["json_schema"]),
        "llamacpp": lambda: body["json_schema"],
        "tgi": lambda: body["parameters"]["grammar"]["value"],
    }[dialect]()
    assert found == schema


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        ('data: {"choices": [{"text": "a", "token_ids": [4], "finish_reason": null}]}\n\n', r"ends without \[DONE\]"),
        ('data: {"error": {"message": "no room"}}\n\ndata: [DONE]\n\n', "tells an error: .*no room"),
        ("data: nonsense\n\ndata: [DONE]\n\n", "is no JSON: nonsense"),
        ("data: [DONE]\n\n", "the stream is empty"),
    ],
)
def test_a_stream_that_breaks_is_a_finding_with_its_request(stream, sentence):
    with (
        serving("vllm", stream) as fake,
        opened(settings_of(fake, "vllm")) as engine,
        pytest.raises(SubjectError, match=rf"request r \(sample 0, seed \d+\): .*{sentence}"),
    ):
        engine.tell(request_of(), stream=True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_without_a_seed_goes_without_one(dialect, folder):
    with serving(dialect, "") as fake, opened(settings_of(fake, dialect, folder)) as engine:
        engine.tell(request_of(seeded=False))
    (body,) = fake.bodies
    sent = {**body, **body.get("sampling_params", {}), **body.get("parameters", {})}
    assert [sent[name] for name in ("seed", "sampling_seed") if name in sent] == [-1 if dialect == "llamacpp" else None]


def test_the_cell_finds_a_server_that_loses_a_token_of_each_delta(tmp_path):
    """A parser that takes the last token of an event for all of it."""
    from specverify.conformance import engine_plan, laws_of_folders, qualify_engine

    pair = write_calibration_pair(tmp_path / "pair", opposed=False)
    ids, blocks = [4, 5, 6, EOS], [[5], [6], [EOS]]
    said, texts = ["]", ":", ",", ""], [[":"], [","], [""]]
    with faking(
        lambda _, body: (200, stream_of("vllm", blocks, texts, "eos") if body.get("stream") else told_of("vllm", ids, said, "eos"))
    ) as fake, opened(settings_of(fake, "vllm", pair.target)) as engine:  # fmt: skip
        laws = laws_of_folders(pair.target, None, eos_token_ids=(EOS,), max_length=64, seed=1)
        (result,) = qualify_engine(engine, None, None, laws, engine_plan("quick", only=("streams",))).checks
    assert result.verdict == "FAIL"
    assert "the text is ']:,' whole and ':,' streamed" in result.summary


def test_a_line_ends_where_a_stream_says_so():
    """JSON may hold a line separator of Unicode raw."""
    assert events_of('data: {"text": "a\u2028b\x85"}\r\n\r\ndata: {"text": "c"}\n\n', "") == [
        {"text": "a\u2028b\x85"},
        {"text": "c"},
    ]
