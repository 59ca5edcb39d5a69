"""Many pairs at once: the cells of a matrix of targets, drafts, parameters and numbers of tokens, and one table of their certificates.

Note [Matrix]: a cell is certified exactly as its own plan would alone, by a command that its certificate records; the plan holds
the cell's share of the matrix's error budget. Over the matrix, one more question is asked: which cells are lossy, if at most `false_discovery_rate` of those that are named may be named by chance? Each cell's
tests are merged into one e-value, and e-BH answers it [WangRamdas2022], though cells share targets, prompts and seeds. So a cell whose own evidence
stays short of its error budget may fail in the company of others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.judge import headline
from specverify.records import Certificate, CheckResult, Finding, Verdict, worst
from specverify.statistics.discoveries import calibrated, e_benjamini_hochberg, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cell", "MatrixRow", "evidence", "named_lossy", "rows_of", "verdict_of"]

_ABOUT_THE_PAIR = {"compatibility", "cost"}
"""Checks that say nothing about the law of what is emitted."""
_BY_E_BH = "Do not roll this out: e-BH names it as lossy over the matrix, short of the error budget of this cell alone."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One pair with one way of asking it."""

    name: str
    """Of its folder."""
    target: str
    draft: str
    parameters: str
    """The name of the sampling parameters."""
    num_speculative_tokens: int


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """A cell's certificate in one line of the table."""

    cell: Cell
    verdict: Verdict
    """Of the certificate; FAIL where e-BH names the cell."""
    headline: str
    log10_e: float
    """log10 of the cell's e-value against the claim that its law is the target's."""
    discovered: bool
    """Whether e-BH names it over the matrix."""
    expected_acceptance: float
    measured_speedup: float
    unmet: tuple[str, ...] = ()
    """What the policy holds against it, where there is one."""


def evidence(certificate: Certificate) -> float:
    """log10 of one e-value from all tests of a cell: infinite where something was seen that no healthy cell can show."""
    results = [result for result in certificate.checks if result.id not in _ABOUT_THE_PAIR]
    if any(map(_proof, results)):
        return math.inf
    tests = [test for result in results for test in result.tests]
    values = [test.log10_e for test in tests if test.log10_e is not None]
    values += [calibrated(test.p_value) for test in tests if test.p_value is not None]
    return merged(values)


def _proof(result: CheckResult) -> bool:
    """FAIL without a failed test: a token that can't be, not a number that is unlikely; a refusal for cost is neither."""
    refused = result.id == "acceptance"
    return result.verdict is Verdict.FAIL and not refused and not any(test.failed for test in result.tests)


def rows_of(
    cells: Sequence[Cell],
    certificates: Sequence[Certificate],
    false_discovery_rate: float,
    unmet: Sequence[tuple[str, ...]] = (),
) -> list[MatrixRow]:
    """The table, with e-BH over all of it; `unmet` is what a policy holds against each certificate."""
    values = [evidence(certificate) for certificate in certificates]
    discovered = e_benjamini_hochberg(values, false_discovery_rate) if values else ()
    return [
        MatrixRow(
            cell=cell,
            verdict=Verdict.FAIL if named else certificate.verdict,
            headline=_BY_E_BH if named and not _lossy_alone(certificate) else certificate.headline,
            log10_e=value,
            discovered=named,
            expected_acceptance=_figure(certificate, "acceptance", "expected_acceptance"),
            measured_speedup=_figure(certificate, "cost", "measured_speedup"),
            unmet=held,
        )
        for cell, certificate, value, named, held in zip(
            cells, certificates, values, discovered, unmet or [()] * len(cells), strict=True
        )
    ]


def named_lossy(certificate: Certificate, row: MatrixRow) -> Certificate:
    """The certificate of a cell that e-BH names: FAIL, so that the gate holds it back as the table does; any other as it is."""
    if not row.discovered or _lossy_alone(certificate):
        return certificate
    said = (
        f"e-BH names this cell as lossy over the matrix: evidence 10^{row.log10_e:.1f} to 1, of all its tests together"
    )
    about = [result for result in certificate.checks if result.id not in _ABOUT_THE_PAIR]
    blamed = next((result for result in about if result.id == "lossless"), about[0])
    failed = replace(
        blamed,
        verdict=Verdict.FAIL,
        summary=f"{said}; {blamed.summary}",
        findings=(Finding(text=said), *blamed.findings),
    )
    checks = tuple(failed if result is blamed else result for result in certificate.checks)
    whole = not certificate.plan.get("only")
    return replace(
        certificate,
        checks=checks,
        verdict=Verdict.FAIL,
        headline=headline(checks, fault=certificate.fault, whole=whole, engine=certificate.engine),
    )


def _lossy_alone(certificate: Certificate) -> bool:
    """Whether its own error budget says so; a refusal on cost doesn't."""
    results = [result for result in certificate.checks if result.id not in _ABOUT_THE_PAIR]
    return any(_proof(result) or any(test.failed for test in result.tests) for result in results)


def verdict_of(rows: Sequence[MatrixRow]) -> Verdict:
    """The worst of the cells."""
    return worst(row.verdict for row in rows)


def _figure(certificate: Certificate, check_id: str, key: str) -> float:
    found = next((result.measurements.get(key) for result in certificate.checks if result.id == check_id), None)
    return float(found) if isinstance(found, (int, float)) else math.nan
