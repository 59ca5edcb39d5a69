"""An engine in a process of its own: its answers come through whole, and its death is a finding."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specverify.engines import Capability, EngineSettings
from specverify.engines.arms import Guarded
from specverify.engines.child import opened_in_child
from specverify.errors import PlanError, PromptError, SubjectError, UsageError
from specverify.records import DecodeRequest, FinishReason, SamplingParams
from tests.engines.dying import BROKEN, DEADLY, GONE, REFUSED, SILENT

SETTINGS = EngineSettings(target=Path("models"), options=(("a", "1"),))
PARAMS = SamplingParams(banned_token_ids=((1, 2),), stop_strings=("é",))


def request(last: int, *, num_samples: int = 1) -> DecodeRequest:
    return DecodeRequest(id=f"r{last}", prompt_ids=(4, last), params=PARAMS, seed=2**64 - 1, num_samples=num_samples)


def gone(group: int) -> bool:
    """Whether nothing is left of a process and what it has started; the latter is reaped by another, who may be late."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def engine():
    with opened_in_child("tests.engines.dying:opened", SETTINGS) as found:
        yield found


def test_answers_come_through_as_they_were_said(engine):
    """Seeds of 64 bits, tuples of tuples, NaN, and whose answer it is; what the engine prints is none of it."""
    asked = [request(5, num_samples=2), request(6)]
    traces = list(engine.decode(asked))
    assert [(trace.request, trace.sample) for trace in traces] == [(asked[0], 0), (asked[0], 1), (asked[1], 0)]
    assert traces[2].token_ids == (6, 2**64 - 1)
    assert traces[2].finish is FinishReason.STOP
    assert traces[2].steps[0].draft_token_ids == (6,)
    assert traces[2].logprobs[0] == -0.5
    assert math.isnan(traces[2].logprobs[1])
    assert engine.capabilities == {Capability.COUNTERS, Capability.STEPS, Capability.SEED}


@pytest.mark.parametrize(("last", "how"), [(DEADLY, "SIGSEGV"), (GONE, "exit code 7")])
def test_death_is_a_finding_with_its_request_and_the_next_is_answered(engine, last, how):
    """By a new process; what the dead one had counted stays counted."""
    list(engine.decode([request(5)]))
    before = engine.counters().num_draft_tokens
    with pytest.raises(SubjectError, match=rf"answered r{last} \(prompt \[4, {last}\].*its process ended with {how}"):
        list(Guarded(engine).decode([request(last)]))
    list(engine.decode([request(5)]))
    assert engine.counters().num_draft_tokens == before + 1


def test_silence_is_a_finding_with_its_request_and_the_next_is_answered():
    """The child is ended after its time, with what it has started, and the option that gives it more is named.

    What it has started would else hold the pipe open, and us with it. The engine isn't given the option.
    """
    settings = replace(SETTINGS, options=(*SETTINGS.options, ("timeout_s", "0.3")))
    with opened_in_child("tests.engines.dying:opened", settings) as engine:
        silent, begun = engine._process.pid, time.monotonic()
        said = rf"answered r{SILENT} .*no answer within 0.3 s and was ended .*--option timeout_s=SECONDS"
        with pytest.raises(SubjectError, match=said):
            list(Guarded(engine).decode([request(SILENT)]))
        assert time.monotonic() - begun < 30
        assert gone(silent)
        (trace,) = engine.decode([request(5)])
        assert trace.token_ids[0] == 5


@pytest.mark.parametrize("value", ["0", "soon", "-1"])
def test_a_time_that_is_none_is_refused(value):
    settings = replace(SETTINGS, options=(("start_timeout_s", value),))
    said = f"the option start_timeout_s is '{value}'; it must be a positive number"
    with pytest.raises(PlanError, match=said), opened_in_child("tests.engines.dying:opened", settings):
        pass


def test_what_the_engine_raises_is_raised_here(engine):
    """Ours as what it is, another by its name."""
    with pytest.raises(PromptError, match="too long"):
        list(engine.decode([request(REFUSED)]))
    with pytest.raises(SubjectError, match=r"dying raised ZeroDivisionError while it answered r91.*no slots at all"):
        list(Guarded(engine).decode([request(BROKEN)]))


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("tests.engines.dying:refusing", "^models holds no model$"),
        ("tests.engines.dying:dead", "tests.engines.dying can't be opened: .*its process ended with SIGABRT"),
        ("tests.engines.nowhere:opened", "tests.engines.nowhere can't be opened: ModuleNotFoundError: No module"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(factory, said):
    """A user's mistake, whatever broke."""
    with pytest.raises(UsageError, match=said), opened_in_child(factory, SETTINGS):
        pass


def test_the_process_ends_with_the_context():
    """Nothing is left behind."""
    with opened_in_child("tests.engines.dying:opened", SETTINGS) as engine:
        number = engine._process.pid
        os.kill(number, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_the_process_ends_when_ours_is_told_to_end():
    """Also one that hangs in the engine, where it doesn't see that its pipe is closed."""
    program = f"""
        from specverify.engines import child
        from tests.engines.test_child import SETTINGS, request
        child._GRACE_S = 0.1
        with child.opened_in_child("tests.engines.dying:opened", SETTINGS) as engine:
            print(engine._process.pid, flush=True)
            list(engine.decode([request({SILENT})]))
    """
    outer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    with outer:
        number = int(outer.stdout.readline())
        time.sleep(0.5)  # it has fallen silent
        outer.send_signal(signal.SIGTERM)
    assert gone(number)
