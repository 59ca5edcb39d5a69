"""What an engine over HTTP says when its server drops, fails, is late or talks nonsense; its key; and how it is opened."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import stamina

from specverify.engines import EngineSettings
from specverify.engines.openai import opened
from specverify.engines.server import API_KEY
from specverify.errors import RequestRefused, SubjectError, UsageError
from specverify.records import SamplingParams
from tests.engines.fakes import answer_of, faking, request_of, settings_of, vllm_choice


@pytest.fixture(autouse=True)
def _without_waits():
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


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
        pytest.raises(SubjectError, match=r"request r .* got no answer within 1 s .*--option timeout_s"),
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
        ({"url": "http://me:hunter2/x@localhost:8000"}, "is no url of a server"),
        ({"url": ""}, "needs either the url of a server that runs or a command that serves"),
        ({"options": (("colour", "teal"),)}, "no option 'colour'"),
        ({"options": (("dialect", "ollama"),)}, "dialect is 'ollama'; it must be one of vllm, sglang, llamacpp, tgi"),
        ({"options": (("timeout_s", "soon"),)}, "timeout_s is 'soon'"),
        ({"options": (("logprobs", "maybe"),)}, "must be one of yes, no"),
        ({"options": (("extra", "[1]"),)}, "extra is .* must be a JSON object"),
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
        body = self.rfile.read(int(self.headers["Content-Length"]))  # what is left unread resets the connection
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
        pytest.raises(SubjectError, match=r"request r .*exit code 4; its log ends: .*out of slots.*the whole log is"),
    ):
        list(engine.decode([request_of(SamplingParams(max_new_tokens=1))]))


def test_a_server_that_breaks_with_500_and_exit_0_leaves_its_log(tmp_path, monkeypatch):
    """As vLLM does where its engine dies: 500, farewell lines, exit code 0; the error stands far above the log's end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    breaks = """
        print("ValueError: no such kernel", "EngineDeadError: see above", *["bye"] * 9, sep=chr(10), flush=True)
        self.send_response(500); self.end_headers(); self.wfile.write(b"see above"); self.wfile.flush()
        import os; os._exit(0)
        if json.loads"""
    script = tmp_path / "server.py"
    script.write_text(SERVER.replace("\n        if json.loads", breaks))
    settings = EngineSettings(target=Path("t"), serve=f"{sys.executable} {script} {{port}} m {{}}",
                              options=(("dialect", "llamacpp"),))  # fmt: skip
    with opened(settings) as engine:
        with pytest.raises(
            SubjectError,
            match=r"answered 500: see above; .*exit code 0; .*last errors are: ValueError: no such kernel; then EngineDeadError: "
            r"see above; .*bye",
        ):
            list(engine.decode([request_of(SamplingParams(max_new_tokens=1))]))
        log = engine.on.server.log_path
    assert "no such kernel" in log.read_text()


def test_a_server_that_one_request_kills_is_started_again_for_the_next(tmp_path, monkeypatch):
    """Each life has its own log; one that ends whatever it is asked is not started for ever."""
    monkeypatch.setattr("specverify.engines.http_engine._MOST_STARTS", 3)
    dies = """
        if json.loads(body)["n_predict"] == 1:
            import os; os._exit(4)
        if json.loads"""
    script = tmp_path / "server.py"
    script.write_text(SERVER.replace("\n        if json.loads", dies))
    said = []
    settings = EngineSettings(
        target=Path("t"), serve=f"{sys.executable} {script} {{port}} m '{{\"model\": \"m\"}}'",
        options=(("dialect", "llamacpp"), ("log_dir", str(tmp_path))),
    )  # fmt: skip
    deadly, harmless = (request_of(SamplingParams(max_new_tokens=count)) for count in (1, 3))
    with opened(settings, say=said.append) as engine:
        for _ in range(3):
            assert [trace.token_ids for trace in engine.decode([harmless])] == [(7,)]
            with pytest.raises(SubjectError, match=r"request r .*exit code 4"):
                list(engine.decode([deadly]))
        with pytest.raises(SubjectError, match=r"started 3 times and ended each time"):
            list(engine.decode([harmless]))
    assert {path.name for path in tmp_path.glob("*.log")} == {"server-on.log", "server-on-2.log", "server-on-3.log"}
