"""Servers over HTTP: each dialect's fields out and in, and what happens when a server misbehaves."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import stamina

from specverify.engines import ALL_PARAMETERS, Capability, EngineSettings
from specverify.engines.dialect import DIALECTS
from specverify.engines.openai import opened, opened_vllm
from specverify.engines.server import API_KEY
from specverify.errors import PlanError, RequestRefused, SubjectError, UsageError
from specverify.models.calibration import write_calibration_pair
from specverify.records import DecodeRequest, FinishReason, SamplingParams
from tests.engines.fakes import faking

EOS = 31
PLAIN = SamplingParams(max_new_tokens=3, eos_token_ids=(EOS,))
ALL = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.2, min_new_tokens=2, max_new_tokens=6,
    banned_token_ids=((4,), (9,)), eos_token_ids=(EOS,), stop_token_ids=(7,), stop_strings=("ab",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _without_waits():
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_calibration_pair(tmp_path_factory.mktemp("pair") / "pair").target


def request_of(params=PLAIN, **changes) -> DecodeRequest:
    return DecodeRequest(**{"id": "r", "prompt_ids": (1, 2, 3), "params": params, "seed": 5} | changes)


def settings_of(fake, dialect, folder=Path("target"), **options) -> EngineSettings:
    pairs = tuple({"dialect": dialect, **options}.items())
    return EngineSettings(target=folder, url=fake.url, eos_token_ids=(EOS,), options=pairs)


def vllm_choice(ids, reason="length", stop_reason=None, index=0):
    told = {"token_logprobs": [-0.5] * len(ids)}
    return {"index": index, "token_ids": ids, "finish_reason": reason, "stop_reason": stop_reason, "logprobs": told}


def answer_of(dialect: str, ids: list[int], ended: str, n: int = 1):
    """The body in which a server of this dialect hands out these ids."""
    matched = ids[-1] if ended in {"eos", "id"} else "ab"
    if dialect == "vllm":
        reason = "length" if ended == "length" else "stop"
        stop_reason = {"length": None, "eos": None, "id": matched, "word": "ab"}[ended]
        return {"choices": [vllm_choice(ids, reason, stop_reason, index) for index in reversed(range(n))]}
    if dialect == "sglang":
        reason = {"type": "length"} if ended == "length" else {"type": "stop", "matched": matched}
        return {"output_ids": ids, "meta_info": {"finish_reason": reason,
                                                 "output_token_logprobs": [[-0.5, id_, None] for id_ in ids]}}  # fmt: skip
    if dialect == "llamacpp":
        stop_type = {"length": "limit", "eos": "eos", "word": "word"}[ended]
        return {"tokens": ids, "stop_type": stop_type, "completion_probabilities": [{"logprob": -0.5} for _ in ids]}
    reason = {"length": "length", "eos": "eos_token", "word": "stop_sequence"}[ended]
    return {"details": {"finish_reason": reason, "tokens": [{"id": id_, "logprob": -0.5} for id_ in ids]}}


# ------------------------------------------------------------------------------------------------------ each dialect
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("ids", "ended", "finish"),
    [
        ([4, 5, 6], "length", FinishReason.LENGTH),
        ([4, EOS], "eos", FinishReason.EOS),
        ([4, 5], "word", FinishReason.STOP),
    ],
)
def test_ids_endings_and_logprobs_come_back(dialect, ids, ended, finish, folder):
    with (
        faking(lambda _, body: (200, answer_of(dialect, ids, ended, (body or {}).get("n", 1)))) as fake,
        opened(settings_of(fake, dialect, folder)) as engine,
    ):
        traces = list(engine.decode([request_of(num_samples=3, id="a"), request_of(id="b")]))
    assert [(trace.request.id, trace.sample) for trace in traces] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert {trace.token_ids for trace in traces} == {tuple(ids)}
    assert {trace.finish for trace in traces} == {finish}
    assert {trace.logprobs for trace in traces} == {(-0.5,) * len(ids)}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_stop_id_is_a_stop_and_an_eos_id_among_them_an_eos(dialect):
    params = SamplingParams(max_new_tokens=5, eos_token_ids=(EOS, 8), stop_token_ids=(7,))
    for last, finish in ((7, FinishReason.STOP), (8, FinishReason.EOS), (EOS, FinishReason.EOS)):
        body = answer_of(dialect, [4, last], "id")
        with faking(lambda *_, body=body: (200, body)) as fake, opened(settings_of(fake, dialect)) as engine:
            (trace,) = engine.decode([request_of(params)])
        assert trace.finish is finish
        fields = fake.bodies[0].get("sampling_params", fake.bodies[0])
        assert fields["stop_token_ids"] == [EOS, 8, 7]  # they are not the model's own, so all go as stop ids
        assert fields["ignore_eos"] is True


def test_vllm_is_asked_for_everything_that_it_has_a_name_for():
    with faking(lambda *_: (200, answer_of("vllm", [1], "length", 2))) as fake:
        settings = EngineSettings(target=Path("t"), url=fake.url, eos_token_ids=(EOS,))
        with opened_vllm(settings) as engine:
            assert engine.parameters == ALL_PARAMETERS - {"no_repeat_ngram_size"}
            list(engine.decode([request_of(ALL, num_samples=2)]))
    (body,) = fake.bodies
    assert body.pop("seed") not in {5, 0}
    assert body == {
        "model": "tiny", "prompt": [1, 2, 3], "n": 2, "max_tokens": 6, "min_tokens": 2, "temperature": 0.7, "top_k": 5,
        "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "logit_bias": {"4": -100, "9": -100},
        "include_stop_str_in_output": True, "skip_special_tokens": False, "add_special_tokens": False,
        "return_token_ids": True, "logprobs": 0, "ignore_eos": False, "stop_token_ids": [7], "stop": ["ab"],
    }  # fmt: skip


def test_sglang_is_asked_for_everything_that_it_has_a_name_for():
    with (
        faking(lambda *_: (200, answer_of("sglang", [1], "length"))) as fake,
        opened(settings_of(fake, "sglang")) as engine,
    ):
        list(engine.decode([request_of(ALL)]))
    (body,) = fake.bodies
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"] | {"sampling_seed": 0} == {
        "max_new_tokens": 6, "min_new_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05,
        "repetition_penalty": 1.2, "logit_bias": {"4": -100, "9": -100}, "sampling_seed": 0,
        "skip_special_tokens": False, "no_stop_trim": True, "ignore_eos": False, "stop_token_ids": [7], "stop": ["ab"],
    }  # fmt: skip


def test_llamacpp_applies_samplers_in_the_order_of_transformers():
    with (
        faking(lambda *_: (200, answer_of("llamacpp", [1], "length"))) as fake,
        opened(settings_of(fake, "llamacpp")) as engine,
    ):
        assert "stop_token_ids" not in engine.parameters
        list(engine.decode([request_of(ALL), request_of()]))
    full, plain = sorted(fake.bodies, key=lambda body: -len(body["samplers"]))
    assert full["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert plain["samplers"] == ["temperature"]
    assert full["logit_bias"] == [[4, False], [9, False]]
    assert (full["repeat_penalty"], full["repeat_last_n"], full["stop"]) == (1.2, -1, ["ab"])
    assert full["return_tokens"]
    assert not full["cache_prompt"]
    assert "ignore_eos" not in full  # it would ban the EOS, which is another law


def test_tgi_gets_text_and_nothing_that_it_would_refuse(folder):
    with (
        faking(lambda *_: (200, [answer_of("tgi", [1], "length")])) as fake,
        opened(settings_of(fake, "tgi", folder)) as engine,
    ):
        list(
            engine.decode(
                [request_of(), request_of(ALL), request_of(SamplingParams(temperature=0, eos_token_ids=(EOS,)))]
            )
        )
    by_size = sorted((body["parameters"] for body in fake.bodies), key=len)
    assert {body["inputs"] for body in fake.bodies} == {"}[]"}
    assert "temperature" not in by_size[0]
    assert not by_size[0]["do_sample"]
    assert not {"top_k", "top_p", "repetition_penalty"} & set(by_size[1])
    assert (by_size[2]["top_k"], by_size[2]["top_p"], by_size[2]["repetition_penalty"]) == (5, 0.9, 1.2)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
def test_a_ban_of_several_ids_is_refused_aloud(dialect):
    params = SamplingParams(banned_token_ids=((4, 5),), eos_token_ids=(EOS,))
    with (
        faking(lambda *_: (200, {})) as fake,
        opened(settings_of(fake, dialect)) as engine,
        pytest.raises(RequestRefused, match=r"request r \(.*banned sequences"),
    ):
        list(engine.decode([request_of(params)]))
    assert fake.bodies == []


@pytest.mark.parametrize("dialect", ["llamacpp", "tgi"])
def test_an_eos_that_the_model_does_not_have_is_refused_aloud(dialect, folder):
    params = SamplingParams(eos_token_ids=(3,))
    with (
        faking(lambda *_: (200, {})) as fake,
        opened(settings_of(fake, dialect, folder)) as engine,
        pytest.raises(RequestRefused, match="model's own EOS alone"),
    ):
        list(engine.decode([request_of(params)]))


METRICS = """# TYPE {p}spec_decode_num_drafts_total counter
{p}spec_decode_num_drafts_total{{engine="0",model_name="m"}} 10.0
{p}spec_decode_num_drafts_total{{engine="1",model_name="m"}} 2.0
{p}spec_decode_num_draft_tokens_total{{engine="0"}} 36
{p}spec_decode_num_accepted_tokens_total 1.4e+01
{p}spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} 5.0
{p}spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 9.0
{p}something_else_total 7
"""


@pytest.mark.parametrize("dialect", ["vllm", "llamacpp"])
def test_counters_are_read_from_the_metrics_page(dialect):
    page = METRICS.format(p=f"{dialect}:")
    with faking(lambda *_: (200, page)) as fake, opened(settings_of(fake, dialect)) as engine:
        assert Capability.COUNTERS in engine.capabilities
        counted = engine.counters()
    assert (counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens) == (12, 36, 14)
    assert counted.num_accepted_tokens_per_pos == (9, 5)


# ------------------------------------------------------------------------------------------------- seeds and samples
def test_samples_have_unlike_seeds_and_the_same_request_the_same_ones():
    with (
        faking(lambda *_: (200, answer_of("llamacpp", [1], "length"))) as fake,
        opened(settings_of(fake, "llamacpp")) as engine,
    ):
        list(engine.decode([request_of(num_samples=50, seed=1), request_of(num_samples=50, seed=2)]))
        first = sorted(body["seed"] for body in fake.bodies)
        fake.bodies.clear()
        list(engine.decode([request_of(num_samples=50, seed=1), request_of(num_samples=50, seed=2)]))
    assert len(set(first)) == 100
    assert first == sorted(body["seed"] for body in fake.bodies)
    assert all(0 <= seed < 2**32 - 1 for seed in first)


def test_many_samples_are_split_into_calls_and_calls_are_bounded():
    def slowly(_, body):
        time.sleep(0.02)
        return 200, answer_of("vllm", [1], "length", body["n"])

    with faking(slowly) as fake, opened(settings_of(fake, "vllm", concurrency="3")) as engine:
        traces = list(engine.decode([request_of(num_samples=128 * 5 + 1)]))
    assert [trace.sample for trace in traces] == list(range(641))
    assert sorted(body["n"] for body in fake.bodies) == [1, 128, 128, 128, 128, 128]
    assert 1 < fake.most_at_once <= 3


def test_speculation_off_goes_to_the_other_server():
    with (
        faking(lambda *_: (200, answer_of("llamacpp", [1], "length"))) as on,
        faking(lambda *_: (200, answer_of("llamacpp", [2], "length"))) as off,
        opened(settings_of(on, "llamacpp", off_url=off.url)) as engine,
    ):
        assert Capability.SPECULATION_SWITCH in engine.capabilities
        traces = list(engine.decode([request_of(), request_of(speculation=False)]))
    assert [trace.token_ids for trace in traces] == [(1,), (2,)]


def test_speculation_off_without_another_server_is_refused():
    with faking(lambda *_: (200, {})) as fake, opened(settings_of(fake, "llamacpp")) as engine:
        assert Capability.SPECULATION_SWITCH not in engine.capabilities
        with pytest.raises(PlanError, match="off_url or serve_off"):
            list(engine.decode([request_of(speculation=False)]))


# ------------------------------------------------------------------------------------------------ servers that fail
def test_dropped_connections_are_tried_again_and_counted():
    dropped = iter([True, True, False])

    def answer(*_):
        if next(dropped):
            raise ConnectionError
        return 200, answer_of("llamacpp", [1], "length")

    with faking(answer) as fake, opened(settings_of(fake, "llamacpp")) as engine:
        (trace,) = engine.decode([request_of()])
        assert engine.retries == 2
    assert trace.token_ids == (1,)
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]


def test_a_server_that_always_drops_is_a_finding():
    def answer(*_):
        raise ConnectionError

    with faking(answer) as fake, opened(settings_of(fake, "llamacpp", attempts="3")) as engine:
        with pytest.raises(SubjectError, match=r"request r \(sample 0, seed \d+\): POST /completion failed"):
            list(engine.decode([request_of()]))
        assert engine.retries == 2


@pytest.mark.parametrize(
    ("status", "kind"), [(500, SubjectError), (503, SubjectError), (400, RequestRefused), (422, RequestRefused)]
)
def test_an_error_is_a_finding_with_its_request_and_first_line_and_is_asked_once(status, kind):
    body = "\n  no room for the draft's cache\nTraceback (most recent call last)"
    with faking(lambda *_: (status, body)) as fake, opened(settings_of(fake, "vllm")) as engine:
        with pytest.raises(kind) as raised:
            list(engine.decode([request_of(id="stops/7")]))
        assert engine.retries == 0
    assert len(fake.bodies) == 1
    sentence = str(raised.value)
    assert sentence.startswith("request stops/7 (sample 0, seed ")
    assert sentence.endswith(f"POST /v1/completions answered {status}: no room for the draft's cache")
    assert type(raised.value) is kind


def test_an_answer_that_is_late_is_a_finding_and_is_asked_once():
    def late(*_):
        time.sleep(1.5)
        return 200, {}

    with (
        faking(late) as fake,
        opened(settings_of(fake, "vllm", timeout_s="1")) as engine,
        pytest.raises(SubjectError, match=r"request r .* got no answer in time"),
    ):
        list(engine.decode([request_of()]))
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("no json", "the answer is no JSON: no json"),
        ({"choices": [{"index": 0, "finish_reason": "length"}]}, "the answer has no token_ids"),
        ({"choices": [vllm_choice(["a"])]}, "no list of integers"),
        ({"choices": [vllm_choice([1], "abort")]}, "the text ended with 'abort'"),
        ({"choices": []}, "1 samples were asked for, and 0 came"),
        ([], "the answer has no choices"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_finding(body, sentence):
    with (
        faking(lambda *_: (200, body)) as fake,
        opened(settings_of(fake, "vllm")) as engine,
        pytest.raises(SubjectError, match=sentence) as raised,
    ):
        list(engine.decode([request_of()]))
    assert str(raised.value).startswith("request r (")


def test_a_log_probability_that_is_none_is_kept_as_nan():
    body = {"choices": [vllm_choice([1, 2]) | {"logprobs": {"token_logprobs": [None, -1.0]}}]}
    with faking(lambda *_: (200, body)) as fake, opened(settings_of(fake, "vllm")) as engine:
        (trace,) = engine.decode([request_of()])
    assert trace.logprobs[0] != trace.logprobs[0]
    assert trace.logprobs[1] == -1


# ------------------------------------------------------------------------------------------------------ key and setup
def test_the_key_goes_into_the_header_and_nowhere_else(monkeypatch, capsys, caplog):
    monkeypatch.setenv(API_KEY, "sesame-1234")

    def answer(_, body):
        return 500, f"bad key? you sent Bearer sesame-1234 with {body}"

    with faking(answer) as fake, opened(settings_of(fake, "vllm")) as engine:
        with pytest.raises(SubjectError) as raised:
            list(engine.decode([request_of()]))
        said = [str(raised.value), repr(engine), engine.name, caplog.text, *capsys.readouterr()]
    assert fake.headers[0]["Authorization"] == "Bearer sesame-1234"
    assert "Bearer ***" in said[0]
    assert not any("sesame" in text for text in said)


def test_without_a_key_there_is_no_header(monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    with (
        faking(lambda *_: (200, answer_of("vllm", [1], "length"))) as fake,
        opened(settings_of(fake, "vllm")) as engine,
    ):
        list(engine.decode([request_of()]))
    assert "Authorization" not in fake.headers[0]


def test_a_refused_key_is_the_users_to_mend():
    with (
        faking(lambda *_: (401, "who are you?")) as fake,
        opened(settings_of(fake, "vllm")) as engine,
        pytest.raises(UsageError, match=API_KEY),
    ):
        list(engine.decode([request_of()]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"url": "http://127.0.0.1:9"}, "no server answers at http://127.0.0.1:9"),
        ({"url": "localhost:8000"}, "is no url of a server"),
        ({"url": ""}, "needs either the url of a server that runs or a command that serves"),
        ({"options": (("colour", "teal"),)}, "no option 'colour'"),
        ({"options": (("dialect", "ollama"),)}, "no dialect 'ollama'; use one of vllm, sglang, llamacpp, tgi"),
        ({"options": (("timeout_s", "soon"),)}, "timeout_s is 'soon'"),
        ({"options": (("logprobs", "maybe"),)}, "must be yes or no"),
        ({"url": "", "serve": "vllm serve {target}"}, "needs {port}"),
    ],
)
def test_mistakes_are_one_sentence(changes, sentence):
    base = {"target": Path("t"), "url": "http://127.0.0.1:9"}
    with pytest.raises(UsageError, match=sentence), opened(EngineSettings(**base | changes)):
        pass


SERVER = """
import json, sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def do_POST(self):
        if json.loads(sys.argv[3])["model"] != sys.argv[2]: sys.exit(9)
        self.send_response(200); self.end_headers()
        self.wfile.write(b'{"tokens": [7], "stop_type": "limit"}')
    def log_message(self, *a): pass
print("words:", sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_command_is_filled_in_started_and_ended(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = f'{sys.executable} {script} {{port}} {{draft}} \'{{"model": "{{draft}}"}}\''
    settings = EngineSettings(
        target=Path("t"), draft=Path("a draft"), serve=command,
        options=(("dialect", "llamacpp"), ("log_dir", str(tmp_path))),
    )  # fmt: skip
    said = []
    with opened(settings, say=said.append) as engine:
        (trace,) = engine.decode([request_of(SamplingParams(max_new_tokens=1))])
        process = engine.on.server.process
    assert trace.token_ids == (7,)
    assert process.returncode is not None
    assert "a draft" in (tmp_path / "server-on.log").read_text()
    assert said


def test_a_server_that_dies_is_a_finding_with_its_last_words(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        SERVER.replace(
            "if json.loads", "print('out of slots', flush=True); import os; os._exit(4)\n        if json.loads"
        )
    )
    settings = EngineSettings(
        target=Path("t"), serve=f"{sys.executable} {script} {{port}} m {{}}",
        options=(("dialect", "llamacpp"), ("log_dir", str(tmp_path))),
    )  # fmt: skip
    with (
        opened(settings) as engine,
        pytest.raises(SubjectError, match=r"request r .*exit code 4; its log ends: .*out of slots"),
    ):
        list(engine.decode([request_of(SamplingParams(max_new_tokens=1))]))
