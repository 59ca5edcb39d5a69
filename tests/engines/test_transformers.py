"""transformers' own assisted generation, behind the seam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specverify.checks.counters import impossible_counters
from specverify.engines import EngineSettings
from specverify.engines.registry import opened
from specverify.errors import PlanError, PromptError
from specverify.models.calibration import write_calibration_pair
from specverify.records import DecodeRequest, FinishReason, SamplingParams

PARAMS = SamplingParams(max_new_tokens=10, eos_token_ids=(31,))
REQUEST = DecodeRequest(id="r", prompt_ids=(1, 2, 3, 4, 1, 2, 3, 4), params=PARAMS, seed=5, num_samples=2)
GREEDY = replace(REQUEST, params=replace(PARAMS, temperature=0), num_samples=1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """The near calibration pair."""
    pair = write_calibration_pair(tmp_path_factory.mktemp("pair") / "near", opposed=False)
    return EngineSettings(target=pair.target, draft=pair.draft, eos_token_ids=(31,))


@pytest.mark.parametrize(
    ("name", "options"), [("transformers", ()), ("transformers", (("early_exit", "1"),)), ("transformers-lookup", ())]
)
def test_steps_are_told_and_possible(settings, name, options):
    """They add up to the text, no step accepts more than it drafts, and something is drafted."""
    with opened(name, replace(settings, options=options)) as engine:
        traces = list(engine.decode([REQUEST, GREEDY]))
    assert all(sum(step.num_emitted_tokens for step in trace.steps) == len(trace.token_ids) for trace in traces)
    assert impossible_counters(traces) == ()
    assert any(step.num_draft_tokens for trace in traces for step in trace.steps)


def test_the_same_seed_gives_the_same_text_and_leaves_torch_alone(settings):
    """Another sample gives another."""
    import torch

    before = torch.random.get_rng_state()
    with opened("transformers", settings) as engine:
        first, second = (list(engine.decode([REQUEST])) for _ in range(2))
    assert first == second
    assert first[0].token_ids != first[1].token_ids
    assert torch.equal(before, torch.random.get_rng_state())


def test_off_arm_drafts_nothing_and_says_the_same_greedily(settings):
    """`speculation=False`, and a folder without a draft, are the target alone."""
    with opened("transformers", settings) as engine, opened("transformers", replace(settings, draft=None)) as alone:
        (on,), (off,) = engine.decode([GREEDY]), engine.decode([replace(GREEDY, speculation=False)])
        (bare,) = alone.decode([GREEDY])
    assert on.token_ids == off.token_ids == bare.token_ids
    assert off.steps == bare.steps == ()


def test_stops_are_told_apart(settings):
    """A stop string that falls on the last token, too."""
    with opened("transformers", settings) as engine:
        (text,) = engine.decode([replace(GREEDY, speculation=False, params=replace(GREEDY.params, eos_token_ids=()))])
        first = text.token_ids[0]
        asked = {
            FinishReason.EOS: replace(GREEDY.params, eos_token_ids=(first,)),
            FinishReason.STOP: replace(GREEDY.params, stop_token_ids=(first,)),
            FinishReason.LENGTH: replace(GREEDY.params, eos_token_ids=(), max_new_tokens=1),
        }
        for finish, params in asked.items():
            (trace,) = engine.decode([replace(GREEDY, params=params)])
            assert (trace.token_ids, trace.finish) == ((first,), finish)
        stop = replace(GREEDY.params, max_new_tokens=1, stop_strings=(engine.tokenizer.decode([first]),))
        (trace,) = engine.decode([replace(GREEDY, params=stop)])
        assert trace.finish is FinishReason.STOP


def test_what_does_not_fit_is_refused(settings):
    """With the request's id."""
    with (
        opened("transformers", replace(settings, max_length=12)) as engine,
        pytest.raises(PromptError, match="r asks for 18"),
    ):
        list(engine.decode([REQUEST]))


def test_unknown_option_is_one_sentence(settings):
    """It names those that there are."""
    with (
        pytest.raises(PlanError, match="no option 'layers'; it may be one of dtype, device"),
        opened("transformers", replace(settings, options=(("layers", "1"),))),
    ):
        pass


def test_a_folder_that_is_no_model_is_one_sentence():
    """As everywhere."""
    from specverify.errors import PairError

    with pytest.raises(PairError), opened("transformers", EngineSettings(target=Path("nothing-here"))):
        pass


@pytest.mark.parametrize("name", ["transformers", "transformers-lookup"])
def test_a_stream_says_what_is_said_whole(settings, name):
    """Through transformers' own streamer, with the ids that it was given."""
    with opened(name, settings) as engine:
        for request in (REQUEST, GREEDY, replace(GREEDY, speculation=False)):
            whole, streamed = engine.tell(request), engine.tell(request, stream=True)
            assert (streamed.text, streamed.token_ids, streamed.finish) == (whole.text, whole.token_ids, whole.finish)
            assert "".join(streamed.pieces) == whole.text
        (trace, _) = engine.decode([REQUEST])
        assert engine.tell(REQUEST).token_ids == trace.token_ids


def test_a_request_without_a_seed_says_another_thing_each_time(settings):
    """Twelve tokens don't agree by chance."""
    with opened("transformers", settings) as engine:
        request = replace(REQUEST, seeded=False, params=replace(PARAMS, max_new_tokens=12, eos_token_ids=()))
        texts = {trace.token_ids for _ in range(2) for trace in engine.decode([request])}
    assert len(texts) == 4


def test_a_schema_is_refused_aloud(settings):
    """`generate` has none."""
    with opened("transformers", settings) as engine, pytest.raises(PlanError, match="takes no JSON schema"):
        engine.tell(REQUEST, schema="{}")
