"""`specverify certify --matrix` on the embedded pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from specverify.pairs import embedded
from specverify.records import Verdict
from specverify.statement import read_certificate
from tests.cli.test_bad_input import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.cli.conftest import FakeChecks, Run

PAIR = embedded()


def written(folder: Path) -> Path:
    """One target, two drafts, two numbers of tokens."""
    file = folder / "pairs.toml"
    drafts = json.dumps([str(PAIR.draft), str(embedded("embedded-poor").draft)])
    file.write_text(
        f"targets = ['{PAIR.target}']\ndrafts = {drafts}\nnum_speculative_tokens = [2, 3]\n[plan]\nmax_prompts = 4\n"
    )
    return file


def test_every_cell_has_its_certificate_and_the_matrix_its_table(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path
) -> None:
    """Exit code of the worst cell; a cell's own command makes its certificate again."""
    fakes(one=Verdict.PASS, two=Verdict.INCONCLUSIVE)
    outcome = run("certify", "--matrix", written(tmp_path), "--seed", "5")
    assert outcome.code == 3, outcome.err
    folder = tmp_path / "specverify-out" / "pairs"
    found = [read_certificate(each) for each in sorted(folder.glob("*/certificate.json"))]
    assert [certificate.plan["num_speculative_tokens"] for certificate in found] == [2, 3, 2, 3]
    assert len({certificate.draft.weights_sha256 for certificate in found if certificate.draft}) == 2
    assert {certificate.seed for certificate in found} == {5}
    assert "/plan.toml" in found[0].command
    assert "4 cells: 4 INCONCLUSIVE; 0 named" in outcome.out
    assert (folder / "matrix.md").read_text().startswith("## 4 cells")
    assert not list(folder.glob("*/checkpoint.json"))
    assert len(run("certify", "--matrix", "pairs.toml", "--json").json["cells"]) == 4


def test_the_gate_holds_back_a_cell_that_only_e_bh_names(
    run: Run, fakes: Callable[..., FakeChecks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own certificate says FAIL, and its report."""
    fakes(lossless=Verdict.PASS)
    told = iter([12.0, -1.0, -1.0, -1.0])
    monkeypatch.setattr("specverify.matrix.evidence", lambda _: next(told))
    assert run("certify", "--matrix", written(tmp_path), "--quiet").code == 1
    first, *others = sorted((tmp_path / "specverify-out" / "pairs").glob("*/certificate.json"))
    assert read_certificate(first).verdict is Verdict.FAIL
    assert {read_certificate(each).verdict for each in others} == {Verdict.PASS}
    assert "e-BH names this cell" in (first.parent / "report.html").read_text()
    assert "e-BH names this cell" in run("gate", first, PAIR.target, PAIR.draft).out


def test_an_earlier_table_does_not_stand_beside_a_refusal(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path
) -> None:
    """It is in `previous/`."""
    fakes(one=Verdict.PASS)
    file = written(tmp_path)
    assert run("certify", "--matrix", file, "--quiet").code == 0
    file.write_text(file.read_text().replace(str(PAIR.draft), str(tmp_path / "nowhere")))
    assert run("certify", "--matrix", file, "--quiet").code == 2
    folder = tmp_path / "specverify-out" / "pairs"
    assert not list(folder.glob("matrix.*"))
    assert {each.name for each in (folder / "previous").iterdir()} == {"matrix.md", "matrix.json"}


def test_an_interrupted_matrix_resumes(run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path) -> None:
    """What was finished is not asked again."""
    file = written(tmp_path)
    fakes(one=Verdict.PASS, two=Verdict.PASS, raises={"two": KeyboardInterrupt()})
    assert run("certify", "--matrix", file).code == 130
    again = fakes(one=Verdict.PASS, two=Verdict.PASS)
    assert run("certify", "--matrix", file, "--quiet").code == 0
    assert again.asked == ["two", *["one", "two"] * 3]


def test_a_bad_cell_is_refused_before_the_first_is_certified(
    run: Run, fakes: Callable[..., FakeChecks], tmp_path: Path, copied: Callable[[str], Path]
) -> None:
    """A folder that isn't there by its name, a draft that doesn't fit by loading it; nothing is left behind."""
    asked = fakes(one=Verdict.PASS).asked
    weights = copied("draft") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    larger = embedded().target  # as a draft of the poor pair's draft
    for target, draft, said in (
        (PAIR.target, "./nowhere", "'./nowhere' does not exist"),
        (PAIR.target, weights.parent, "truncated or corrupt"),
        (embedded("embedded-poor").draft, larger, "larger than the target"),
    ):
        (tmp_path / "m.toml").write_text(
            f"targets = ['{target}']\ndrafts = ['{embedded('embedded-poor').draft}', '{draft}']\n"
        )
        refused(run("certify", "--matrix", "m.toml", "--quiet"), said, tmp_path)
        assert not (tmp_path / "specverify-out").exists() or not list((tmp_path / "specverify-out").rglob("plan.toml"))
    assert not asked


def test_what_the_matrix_sets_is_not_set_again(run: Run, tmp_path: Path) -> None:
    """Nor is it mixed with a pair."""
    outcome = run("certify", "a", "b", "--matrix", written(tmp_path))
    assert outcome.code == 2
    assert "--matrix says what is certified" in outcome.err
    assert run("certify", "--matrix", "nowhere.toml").code == 2
