"""`specverify bench` and `specverify rank` from the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

SMALL = ("bench", "--suite", "verification", "--vocab-sizes", "48", "--repeats", "2")


def test_a_record_and_the_next_one_against_it(run: Run, tmp_path: Path) -> None:
    """All raw times are in the file; a later run is held against them, or is inconclusive."""
    file = tmp_path / "bench.json"
    first = run(*SMALL, "--out", str(file))
    assert first.code == 0
    assert "times the speed of naive torch" in first.out
    record = json.loads(file.read_text(encoding="utf-8"))
    assert len(record["comparisons"][0]["raw_s"]) == 2
    record["environment"]["cpu"] = "another machine"
    file.write_text(json.dumps(record), encoding="utf-8")
    second = run(*SMALL, "--against", str(file), "--quiet")
    assert second.code == 3
    assert second.out.startswith("INCONCLUSIVE")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "--suite", "verificaton"), "no suite named 'verificaton'; did you mean 'verification'?"),
        (("bench", "--vocab-sizes", "many"), "--vocab-sizes 'many' are no sizes"),
        (("bench", "--against", "nowhere.json"), "nowhere.json"),
        (("rank", "--batch", "0"), "--batch '0' are no batch sizes"),
        (("rank", "target"), "target needs at least one DRAFT after it"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    """With exit code 2."""
    done = run(*arguments)
    assert done.code == 2
    assert sentence in done.err


def test_rank_names_a_loss(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is seldom accepted, where its pass costs what the target's does; picture and record lie where they were asked for."""
    from specverify.checks.cost import Costs
    from specverify.pairs import embedded

    def as_dear(*_: object, most: int, **__: object) -> Costs:
        return Costs(draft_ms=1.0, target_ms=dict.fromkeys(range(1, most + 1), 1.0))

    monkeypatch.setattr("specverify.rank.measured_costs", as_dear)
    pair = embedded("embedded-poor")
    done = run(
        "rank",
        str(pair.target),
        str(pair.draft),
        "--num-speculative-tokens",
        "3",
        "--batch",
        "1",
        "--out",
        str(tmp_path),
    )
    assert done.code == 1
    assert "speculation is a loss with every draft" in done.out
    assert (tmp_path / "pareto.svg").read_text(encoding="utf-8").startswith("<svg")
    assert json.loads((tmp_path / "rank.json").read_text(encoding="utf-8"))["drafts"][0]["name"] == "draft-poor"
