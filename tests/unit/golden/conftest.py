"""A tiny pair, its recording, and a check of any folder against it; made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specverify.golden.job import check, provenance, record
from specverify.models.loading import load_pair
from specverify.records import Message, Prompt
from tests.unit.golden.upgrades import tiny_pair

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.golden.records import GoldenReport, Provenance, Recording
    from specverify.models.loading import Pair

PROMPTS = (
    Prompt(id="text", domain="text", text="Elizabeth did not quite equal HER father in"),
    Prompt(id="code", domain="code", text="def f(x):\n    return"),
    Prompt(id="chat", domain="chat", text="", messages=(Message("user", "Who are you?"),)),
)


def now(dtype: str = "float32") -> Provenance:
    """Of a test."""
    return provenance(torch.device("cpu"), dtype, command="test", reason="test")


@dataclass(frozen=True)
class Recorded:
    """A pair and its golden."""

    folder: Path
    pair: Pair
    recording: Recording

    def check(self, folder: Path | None = None, *, dtype: str = "float32", **options: Any) -> GoldenReport:
        """The report of a folder, or of the pair itself."""
        pair = self.pair if folder is None else load_pair(folder / "target", folder / "draft", dtype=dtype)
        return check(pair, self.recording, provenance=now(dtype), **options)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The tiny pair."""
    folder = tiny_pair(tmp_path_factory.mktemp("golden") / "pair")
    pair = load_pair(folder / "target", folder / "draft")
    golden = record(pair, PROMPTS, name="tiny", provenance=now(), max_new_tokens=12)
    return Recorded(folder, pair, golden)
