"""What `specverify qualify transformers` shows, so that a new release that shows something else is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from specverify.conformance import EngineRun, engine_plan, run_engine
from specverify.engines import EngineSettings
from specverify.records import Verdict

MODES = [("transformers", ()), ("transformers", (("early_exit", "1"),)), ("transformers-lookup", ())]
KNOWN = {"stop_strings"}
"""docs/engines.md has the smallest reproductions."""


def failed(name: str, options: tuple[tuple[str, str], ...], *only: str) -> set[str]:
    """Ids of the cells that fail."""
    settings = EngineSettings(target=Path(), options=options)
    certificate = run_engine(EngineRun(name=name, settings=settings), engine_plan("quick", only=only))
    return {one.id for one in certificate.checks if one.verdict is Verdict.FAIL}


def test_a_few_cells_hold():
    """Those that cost least, on every push."""
    assert failed("transformers", (), "drafting", "counters") == set()


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "options"), MODES)
def test_nothing_but_the_known_fails(name, options):
    """Assisted generation, early exit and prompt lookup, every cell."""
    assert failed(name, options) <= KNOWN
