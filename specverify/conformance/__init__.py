"""Somebody else's whole engine: is its speculation sound? Cells of claims, held against a calibration pair's exact law.

Flow: an engine ON, OFF and OFF′, and the laws of a calibration pair → cells → judge → one certificate of the engine.
`run_conformance(factory)` is the one call for an engine author's own test suite.
"""

from __future__ import annotations

from specverify.conformance.cells import CELLS, ENGINE_BUDGETS, OFF_CELLS, engine_plan, qualify_engine
from specverify.conformance.laws import Laws, laws_of_folders, laws_of_models
from specverify.conformance.run import EngineRun, run_conformance, run_engine

__all__ = [
    "CELLS",
    "ENGINE_BUDGETS",
    "OFF_CELLS",
    "EngineRun",
    "Laws",
    "engine_plan",
    "laws_of_folders",
    "laws_of_models",
    "qualify_engine",
    "run_conformance",
    "run_engine",
]
