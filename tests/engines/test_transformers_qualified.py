"""What `specverify qualify transformers` shows, so that a new release that shows something else is noticed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specverify.conformance import EngineRun, engine_plan, run_engine
from specverify.engines import EngineSettings
from specverify.engines.registry import opened
from specverify.faults.engine import find_engine_fault
from specverify.models.calibration import write_calibration_pair
from specverify.records import Verdict

MODES = [
    ("transformers", (), {"stop_strings"}),
    ("transformers", (("early_exit", "1"),), {"stop_strings", "neighbours", "prefix_cache", "context"}),
    ("transformers-lookup", (), {"stop_strings"}),
]
"""Each with the cells that are known to fail; docs/engines.md has the smallest reproductions."""
TRANSLATED = (("different_tokenizers", "yes"),)


def failed(name: str, options: tuple[tuple[str, str], ...], *only: str) -> set[str]:
    """Ids of the cells that fail."""
    settings = EngineSettings(target=Path(), options=options)
    certificate = run_engine(EngineRun(name=name, settings=settings), engine_plan("quick", only=only))
    return {one.id for one in certificate.checks if one.verdict is Verdict.FAIL}


def test_a_few_cells_hold():
    """Those that cost least, on every push."""
    assert failed("transformers", (), "drafting", "counters") == set()


HALF = (("dtype", "bfloat16"),)


@contextlib.contextmanager
def swapped(settings):
    """transformers, with two answers of a batch swapped."""
    with opened("transformers", settings) as engine:
        yield find_engine_fault("answers-swapped").plant(engine)


@pytest.mark.nightly
def test_half_precision_is_no_fault_and_hides_none():
    """Its own OFF arm shows what it rounds; a token further off fails as ever."""
    assert failed("transformers", HALF, "greedy") == set()
    found = failed("tests.engines.test_transformers_qualified:swapped", HALF, "greedy")
    assert found >= {"off/greedy", "greedy, opposed draft", "greedy, 1 drafts"}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "options", "known"), MODES)
def test_nothing_but_the_known_fails(name, options, known):
    """Assisted generation, early exit and prompt lookup, every cell."""
    assert failed(name, options) <= known


def test_an_exception_while_it_drafts_by_early_exit_leaves_the_target_with_fewer_layers(tmp_path):
    """A fault of transformers, found here. When this fails, it has been mended."""
    pair = write_calibration_pair(tmp_path / "pair")
    target, tokenizer = (kind.from_pretrained(pair.target) for kind in (AutoModelForCausalLM, AutoTokenizer))
    layers = target.config.num_hidden_layers
    with pytest.raises(ValueError, match="stop strings"):
        target.generate(
            torch.tensor([[20, 21, 22]]), assistant_early_exit=1, tokenizer=tokenizer, stop_strings=["dee"],
            max_new_tokens=4, do_sample=False, eos_token_id=31, pad_token_id=0,
        )  # fmt: skip
    assert (layers, target.config.num_hidden_layers) == (2, 1)


def test_a_draft_with_a_tokenizer_of_its_own_breaks_greedy_requests_after_sampled_ones():
    """A fault of transformers, found here: a sampled call prunes the draft's head in place. When this fails, it has been mended."""
    assert "drafting" in failed("transformers", TRANSLATED, "drafting")


@pytest.mark.nightly
def test_a_draft_with_a_tokenizer_of_its_own_changes_the_law():
    """Another one: the draft's logits are read in another order than they are written. When this fails, it has been mended."""
    assert "lossless, opposed draft" in failed("transformers", TRANSLATED, "lossless")
