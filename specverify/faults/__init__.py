"""Planted faults: each stands for a class of public bugs, and names checks that must see it.

A fault changes one part of the reference decoder (or what an engine makes of its answers) and leaves the loop as it is,
so a check that passes under it is blind to that class. The tests prove `caught_by` for each; `specverify faults` measures
every fault against every check. A module a part: what it holds is listed under that name in `FAMILIES`.
"""

from __future__ import annotations

from difflib import get_close_matches

from specverify.errors import PlanError
from specverify.faults.batch import BATCH_FAULTS
from specverify.faults.cache import CACHE_FAULTS
from specverify.faults.counter import COUNTER_FAULTS
from specverify.faults.draft import DRAFT_FAULTS
from specverify.faults.fault import Fault
from specverify.faults.number import NUMBER_FAULTS
from specverify.faults.parameter import PARAMETER_FAULTS
from specverify.faults.row import ROW_FAULTS
from specverify.faults.rule import RULE_FAULTS
from specverify.faults.stop import STOP_FAULTS
from specverify.faults.stream import STREAM_FAULTS
from specverify.faults.tree import TREE_FAULTS

__all__ = ["FAMILIES", "FAULTS", "Fault", "find_fault"]

FAMILIES: dict[str, tuple[Fault, ...]] = {
    "acceptance and residual": RULE_FAULTS,
    "wrong row": ROW_FAULTS,
    "random streams": STREAM_FAULTS,
    "draft law": DRAFT_FAULTS,
    "cache": CACHE_FAULTS,
    "parameters": PARAMETER_FAULTS,
    "stop and length": STOP_FAULTS,
    "batch": BATCH_FAULTS,
    "numbers and vocabulary": NUMBER_FAULTS,
    "counters": COUNTER_FAULTS,
    "several drafts": TREE_FAULTS,
}
"""Faults by the part that is wrong."""

FAULTS: tuple[Fault, ...] = tuple(fault for family in FAMILIES.values() for fault in family)
"""All planted faults, in the order in which `specverify faults` lists them."""


def find_fault(name: str) -> Fault:
    """The fault of that name. Raises `PlanError` with the nearest name."""
    known = {fault.name: fault for fault in FAULTS}
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "`specverify faults --list` names them"
        msg = f"there is no fault named '{name}'; {hint}"
        raise PlanError(msg)
    return known[name]
