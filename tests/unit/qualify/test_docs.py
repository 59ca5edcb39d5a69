"""The examples of docs/qualify.md run, have the shape of their heading, and are lossless."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specverify.qualify.claims import CLAIMS, Exact
from specverify.qualify.laws import subject
from specverify.qualify.shapes import SHAPES

TEXT = (Path(__file__).parents[3] / "docs" / "qualify.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### ([\w-]+)\n.*?^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def test_every_shape_has_an_example():
    """And every claim a row."""
    assert set(EXAMPLES) == {shape.name for shape in SHAPES}
    assert re.findall(r"^\| `([\w-]+)` \|", TEXT, re.MULTILINE) == [claim.id for claim in CLAIMS]


@pytest.mark.parametrize("shape", EXAMPLES)
def test_example_is_told_by_its_parameters_and_is_lossless(shape):
    """On all but the largest instance."""
    names = {}
    exec(EXAMPLES[shape], names)
    first = re.search(r"^def (\w+)\(", EXAMPLES[shape], re.MULTILINE)
    assert first is not None
    exact = Exact(subject("example", names[first.group(1)]))
    assert exact.subject.shape.name == shape
    assert not exact.law_is_wrong()
