"""engine: every cell of `specverify qualify ENGINE`, one test each, on the fake or on the one of `--specverify-engine`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from specverify.conformance import CELLS, EngineRun, engine_plan, run_engine
from specverify.engines import EngineSettings
from specverify.errors import ClaimViolated
from specverify.records import Certificate, Verdict


@cache
def found(name: str, options: tuple[str, ...], seed: int) -> Certificate:
    """All cells at once: they share the engine and one error budget."""
    pairs = tuple((each.partition("=")[0], each.partition("=")[2]) for each in options)
    settings = EngineSettings(target=Path(), options=pairs)
    return run_engine(EngineRun(name=name, settings=settings), engine_plan("quick", seed=seed))


@pytest.mark.parametrize("cell_id", [cell.id for cell in CELLS])
def test_cell_holds(cell_id: str, pytestconfig: pytest.Config) -> None:
    """Without speculation, with it, and with other drafts, where it is held on them."""
    name = pytestconfig.getoption("--specverify-engine") or "fake"
    options = tuple(pytestconfig.getoption("--specverify-engine-option"))
    certificate = found(name, options, 17 + (pytestconfig.getoption("--specverify-seed") or 0))
    results = [one for one in certificate.checks if one.id.removeprefix("off/").partition(",")[0] == cell_id]
    wrong = [one for one in results if one.verdict in {Verdict.FAIL, Verdict.INCONCLUSIVE}]
    if wrong:
        reproduce = f"specverify qualify {name} --only {cell_id} --budget quick"
        lines = [f"{one.id} {one.verdict}: {one.summary}" for one in wrong]
        raise ClaimViolated("\n".join([*lines, f"Reproduce: {reproduce}"]))
    if all(one.verdict is Verdict.NOT_RUN for one in results):
        pytest.skip(results[-1].summary)
