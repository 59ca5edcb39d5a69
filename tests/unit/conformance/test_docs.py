"""docs/engines.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

from specverify.conformance import CELLS
from specverify.faults.engine import ENGINE_FAULTS

TEXT = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")


def test_table_has_every_cell_with_its_claim_and_faults():
    """Nothing more, nothing less, in their order."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", TEXT, re.MULTILINE)
    caught = {cell.id: [fault.name for fault in ENGINE_FAULTS if fault.caught_by == cell.id] for cell in CELLS}
    expected = [(cell.id, cell.claim, ", ".join(f"`{name}`" for name in caught[cell.id])) for cell in CELLS]
    assert rows[: len(CELLS)] == expected


def test_the_smallest_engine_takes_what_the_docs_say():
    """The signature in the docs is one that is taken for a function that decodes."""
    from specverify.engines.function import FunctionEngine, decodes

    (source,) = re.findall(r"^    (def decode\(.*\):)$", TEXT, re.MULTILINE)
    scope: dict[str, object] = {}
    exec(f"{source}\n    return [[1]] * n", scope)
    assert decodes(scope["decode"])
    assert FunctionEngine(scope["decode"]).parameters == {"temperature", "top_k", "eos_token_ids"}
