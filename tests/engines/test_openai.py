"""Each dialect's fields, out and in; seeds, samples and the server without speculation."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import stamina

from specverify.engines import ALL_PARAMETERS, Capability, EngineSettings
from specverify.engines.dialect import DIALECTS
from specverify.engines.openai import opened, opened_vllm
from specverify.errors import PlanError, RequestRefused, SubjectError
from specverify.models.calibration import write_calibration_pair
from specverify.records import FinishReason, SamplingParams
from tests.engines.fakes import ALL, EOS, answer_of, faking, request_of, settings_of


@pytest.fixture(autouse=True)
def _without_waits():
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_calibration_pair(tmp_path_factory.mktemp("pair") / "pair").target


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
    assert (full["repeat_penalty"], full["repeat_last_n"], full["stop"]) == (1.2, 9, ["ab"])
    assert full["return_tokens"]
    assert full["cache_prompt"]
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


def test_what_an_engine_is_told_besides_goes_into_every_call():
    with (
        faking(lambda *_: (200, answer_of("llamacpp", [1], "length"))) as fake,
        opened(settings_of(fake, "llamacpp", extra='{"cache_prompt": false, "id_slot": 1}')) as engine,
    ):
        list(engine.decode([request_of(num_samples=2)]))
    assert {(body["cache_prompt"], body["id_slot"]) for body in fake.bodies} == {(False, 1)}


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


def test_vllm_tells_its_own_laws_of_texts_without_speculation():
    """For each token of a text, from the server that doesn't speculate; a dialect that can't says so."""

    def answer(_, body):
        told = [None, *({str(token): {"logprob": -token / 10, "rank": 1}} for token in body["prompt"][1:])]
        told[-1]["9"] = {"logprob": -0.25, "rank": 1}
        return 200, {"choices": [{"prompt_logprobs": told}]}

    with (
        faking(lambda *_: (200, answer_of("vllm", [7, 5], "length"))) as on,
        faking(answer) as off,
        opened(settings_of(on, "vllm", off_url=off.url)) as engine,
    ):
        traces = list(engine.decode([request_of()]))
        assert list(engine.prompt_logprobs(traces, top=4)) == [[{7: -0.7}, {5: -0.5, 9: -0.25}]]
    (body,) = off.bodies
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([1, 2, 3, 7, 5], 4, 1)
    with (
        faking(lambda *_: (200, answer_of("vllm", [7], "length"))) as fake,
        opened(settings_of(fake, "vllm", off_url=fake.url)) as engine,
        pytest.raises(SubjectError, match=r"request r .*no choices.0.prompt_logprobs"),
    ):
        list(engine.prompt_logprobs(traces, top=4))
    with (
        faking(lambda *_: (200, answer_of("sglang", [7], "length"))) as fake,
        opened(settings_of(fake, "sglang", off_url=fake.url)) as engine,
    ):
        assert Capability.PROMPT_LOGPROBS not in engine.capabilities
        with pytest.raises(PlanError, match="sglang is not known to tell"):
            list(engine.prompt_logprobs(traces, top=4))


def test_an_interrupt_waits_for_no_answer_that_is_late():
    """Of texts that are told as of texts that are asked."""
    let_go, waited = threading.Event(), []

    def answer(_, body):
        if body["prompt"][:2] == [2, 2]:
            waited.append(let_go.wait(5))
        told = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        return 200, answer_of("vllm", [7, 5], "length") if body["max_tokens"] > 1 else {
            "choices": [{"prompt_logprobs": told}]
        }

    with faking(answer) as fake, opened(settings_of(fake, "vllm", off_url=fake.url)) as engine:
        (text,) = engine.decode([request_of()])
        late = replace(text, request=replace(text.request, prompt_ids=(2, 2)))
        for answers in (
            engine.prompt_logprobs([text, late], top=1),
            engine.decode([text.request, replace(late.request, id="late")]),
        ):
            next(answers)
            answers.close()
            assert waited == []
        let_go.set()
