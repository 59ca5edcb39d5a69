"""Many certificates in one table: what e-BH names, and the file that says what the cells are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.codec import read_plan
from specverify.errors import PlanError
from specverify.gate import disagreements, unmet
from specverify.matrix import Cell, evidence, named_lossy, rows_of, verdict_of
from specverify.matrix_file import cells_of, plan_text, read_matrix
from specverify.plan import CHECK_IDS, Plan
from specverify.policy import Policy
from specverify.records import Certificate, Finding, Verdict
from specverify.report.matrix import as_object, reasons, render_matrix, sentence, table
from tests.unit.certificates import certificate_of, result_of

if TYPE_CHECKING:
    from pathlib import Path

ALL = [result_of(name) for name in CHECK_IDS]


def with_evidence(log10_e: float) -> Certificate:
    """All checks passed, but for that much in each e-process."""
    return certificate_of(
        *(replace(r, tests=tuple(replace(t, log10_e=log10_e) for t in r.tests if t.log10_e is not None)) for r in ALL)
    )


def cells(number: int) -> list[Cell]:
    """So many pairs."""
    return [
        Cell(name=f"{n}", target="t", draft=f"d|{n}", parameters="default", num_speculative_tokens=3)
        for n in range(number)
    ]


def test_suspects_are_named_in_company() -> None:
    """10^5.5 to 1 is short of a run's budget of 10^6, and beyond doubt over ten cells; a healthy cell is not drawn in."""
    certificates = [with_evidence(5.5), *[with_evidence(-0.5)] * 9]
    rows = rows_of(cells(10), certificates, 1e-3)
    assert [certificate.verdict for certificate in certificates] == [Verdict.PASS] * 10
    assert [row.discovered for row in rows] == [True] + [False] * 9
    assert [row.verdict for row in rows] == [Verdict.FAIL] + [Verdict.PASS] * 9
    assert verdict_of(rows) is Verdict.FAIL
    assert rows[0].headline.startswith("Do not roll this out: e-BH names it")
    failed = [named_lossy(certificate, row) for certificate, row in zip(certificates, rows, strict=True)]
    assert failed[1:] == certificates[1:]
    assert failed[0].headline == "Do not roll this out: lossless failed."
    assert not list(disagreements(failed[0]))
    assert "e-BH names this cell" in next(unmet(failed[0], Policy())).text


def test_refused_on_cost_and_named_as_lossy_is_both() -> None:
    """No certificate says that no check of correctness failed where the table says that the cell is lossy."""
    dear = with_evidence(5.5)
    dear = replace(dear, checks=(*dear.checks[:-1], result_of("cost", Verdict.FAIL)), verdict=Verdict.FAIL)
    row = rows_of(cells(10), [dear, *[with_evidence(-0.5)] * 9], 1e-3)[0]
    assert "e-BH names it" in row.headline
    assert named_lossy(dear, row).headline == "Do not roll this out: lossless, cost failed."
    proven = replace(dear, checks=(*ALL[:4], result_of("stopping", Verdict.FAIL, findings=(Finding(text="past EOS"),))))
    assert named_lossy(proven, row) is proven


def test_proof_and_refusals() -> None:
    """A finding that no healthy cell shows is infinite evidence; a pair refused on cost is not lossy."""
    broken = certificate_of(*ALL[:4], result_of("stopping", Verdict.FAIL, findings=(Finding(text="past EOS"),)))
    assert evidence(broken) == math.inf
    dear = certificate_of(*ALL[:-1], result_of("cost", Verdict.FAIL))
    assert evidence(dear) < 1
    (row,) = rows_of(cells(1), [dear], 1e-3)
    assert (row.verdict, row.discovered) == (Verdict.FAIL, False)


def test_one_table() -> None:
    """A line a cell, in text, Markdown and JSON; a name with a bar in it breaks no table."""
    rows = rows_of(cells(3), [with_evidence(9.0), with_evidence(0.0), with_evidence(0.0)], 1e-3)
    assert len(table(rows).splitlines()) == 4
    markdown = render_matrix(rows, 1e-3)
    assert markdown.count("\n|") == 5
    assert "d\\|0" in markdown
    assert "\n| 2 | t |" in markdown  # the number that its folder begins with
    assert "1 FAIL" in sentence(rows, 1e-3)
    assert as_object(rows, 1e-3)["cells"][0]["discovered"] is True
    assert len(render_matrix(rows * 500, 1e-3)) < 65_000
    assert reasons(rows) == [f"{rows[0].cell.name}: {rows[0].headline}"]
    assert markdown.rstrip().splitlines()[-1].startswith(f"- {rows[0].cell.name}: ")
    assert reasons(rows * 30)[20:] == ["10 more are in matrix.json"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a matrix stands."""
    return tmp_path / "matrix.toml"


def test_cells_and_their_plans(file: Path, tmp_path: Path) -> None:
    """Every combination with a folder of its own, and a plan file that says what it is."""
    file.write_text(
        'targets = ["a/t"]\ndrafts = ["d1", "../d2"]\nnum_speculative_tokens = [2, 5]\n'
        "[parameters.cool]\ntemperature = 0.5\n[parameters.plain]\n[plan]\nbudget = 'quick'\nonly = ['greedy']\n"
    )
    matrix = read_matrix(file)
    found = list(cells_of(matrix))
    assert len({cell.name for cell in found}) == len(found) == 8
    assert all("/" not in cell.name for cell in found)
    (tmp_path / "plan.toml").write_text(plan_text(matrix, found[1]))
    plan = read_plan(tmp_path / "plan.toml", Plan())
    assert (plan.num_speculative_tokens, plan.params.temperature, plan.only) == (5, 0.5, ("greedy",))


def test_cells_and_e_bh_share_one_error_budget(file: Path) -> None:
    """One in a million over all cells together, or what the plan sets."""
    text = "targets = ['t']\ndrafts = ['a', 'b']\nnum_speculative_tokens = [2, 3]\n"
    for given, rate in (("", 1e-6), ("[plan]\nfalse_fail_rate = 1e-3\n", 1e-3)):
        file.write_text(text + given)
        matrix = read_matrix(file)
        cells = list(cells_of(matrix))
        assert f"false_fail_rate = {rate / 2 / 4}" in plan_text(matrix, cells[0])
        assert matrix.named_rate == rate / 2  # e-BH's half follows what the plan sets
    file.write_text("false_discovery_rate = 0.01\n" + text + given)
    assert read_matrix(file).named_rate == 0.01
    assert "lossless_tokens = 7398" in plan_text(matrix, cells[0], lossless_tokens=7_398)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("targets = ['t']", "'drafts' is missing"),
        ("target = ['t']", "unknown key 'target'; did you mean 'targets'"),
        ("targets = ['t']\ndrafts = []", "has 0 cells"),
        ("targets = ['t']\ndrafts = ['d']\nplan.sead = 1", "'plan.sead'; did you mean 'seed'"),
        ("targets = ['t']\ndrafts = ['d']\nplan.num_speculative_tokens = 1", "varies over the cells"),
        ("targets = ['t']\ndrafts = ['d']\nparameters.x.temprature = 1", "did you mean 'temperature'"),
        ("targets = ['t']\ndrafts = ['d']\nfalse_discovery_rate = 0.0", "between 0 and 1"),
        ("targets = 't'\ndrafts = ['d']", "targets: "),
        ("targets = ['t']\ndrafts = ['d', 'd']", r"names one of drafts twice \('d'\)"),
        ("targets = ['.', './']\ndrafts = ['d']", "names one of targets twice"),
        ("targets = ['t']\ndrafts = ['d']\nnum_speculative_tokens = [2, 3, 2]", "num_speculative_tokens twice"),
        ("targets = ['t']\ndrafts = ['d']\n[parameters.a]\ntop_k = 5\n[parameters.b]\ntop_k = 5", "parameters twice"),
        ("targets = ['t']\ndrafts = ['d']\nplan.false_fail_rate = 'low'", "plan.false_fail_rate to 'low'"),
        ("targets = ['t']\ndrafts = ['d']\nplan.false_fail_rate = 0", "must lie between 0 and 1"),
        ("targets = ['t']\ndrafts = ['d']\nnum_speculative_tokens = " + str(list(range(1_001))), "1,001 cells"),
    ],
)
def test_mistakes_name_the_key(file: Path, text: str, said: str) -> None:
    """One sentence each."""
    file.write_text(text)
    with pytest.raises(PlanError, match=said) as caught:
        read_matrix(file)
    assert "\n" not in str(caught.value)
