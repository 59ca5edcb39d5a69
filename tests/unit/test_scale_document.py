"""The sizes in docs/scale.md follow from the numbers beside them."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = re.compile(
    r"^\| [^|]*\| ([\d.e]+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) GB \| ([\d,]+) bytes \| ([\d.]+) GB \|$",
    re.MULTILINE,
)


def test_the_sizes_are_the_arithmetic_that_stands_above_them() -> None:
    """Two bytes a number; keys and values of each layer and head."""
    rows = TABLE.findall((Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8"))
    assert len(rows) == 4
    for parameters, layers, heads, size, weights_gb, token_bytes, rows_gb in rows:
        a_token = 2 * int(layers) * int(heads) * int(size) * 2
        assert int(token_bytes.replace(",", "")) == a_token
        assert f"{2 * float(parameters) / 1e9:.1f}" == weights_gb
        assert f"{128 * 512 * a_token / 1e9:.1f}" == rows_gb
