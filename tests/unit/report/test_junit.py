"""JUnit XML: as red as the exit code, and always XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.records import Finding, Verdict, worst
from specverify.report.junit import render_junit

if TYPE_CHECKING:
    from specverify.records import Certificate


def parsed(certificate: Certificate) -> ET.Element:
    """The rendered XML, read by an XML parser as bytes."""
    return ET.fromstring(render_junit(certificate).encode())


def test_a_case_a_check(certificate: Certificate) -> None:
    """Each check is a test case with its time; the counts add up."""
    suite = parsed(certificate).find("testsuite")
    assert suite is not None
    assert [case.get("name") for case in suite.iter("testcase")] == [check.id for check in certificate.checks]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6", "failures": "2", "errors": "0", "skipped": "1", "time": "611.200",
    }  # fmt: skip
    assert len([*suite.iter("failure")]) == 2
    assert suite.get("timestamp") == "2026-03-02T09:41:07"


def test_failure_text(certificate: Certificate) -> None:
    """A failure holds its text; what XML forbids and what it escapes both survive as text."""
    failed = parsed(certificate).find(".//testcase[@name='lossless']/failure")
    assert failed is not None
    assert failed.get("type") == "fail"
    assert (failed.get("message") or "").startswith("FAIL: stream: evidence 10^11.8")
    assert "<script>alert('x')</script> | a\ufffd\ufffd[31mb" in (failed.text or "")
    assert "Reproduce: specverify certify" in (failed.text or "")


@pytest.mark.parametrize("verdict", Verdict)
def test_as_red_as_the_exit_code(certificate: Certificate, verdict: Verdict) -> None:
    """A run that exits with 1 or 3 has a failure in its JUnit file, and one that passes has none."""
    checks = (replace(certificate.checks[0], verdict=verdict),)
    root = parsed(replace(certificate, checks=checks, verdict=worst(check.verdict for check in checks)))
    assert (root.get("failures") == "1") == (verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE))
    assert {*root.keys()} == {"name", "tests", "failures", "errors", "time"}  # all that Jenkins' junit-10.xsd allows
    assert (root[0].get("skipped") == "1") == (verdict is Verdict.NOT_RUN)


def test_planted_fault(certificate: Certificate) -> None:
    """A demonstration says so in the suite's name."""
    suite = parsed(replace(certificate, fault="accept_leq", draft=None)).find("testsuite")
    assert suite is not None
    assert "[planted fault: accept_leq]" in (suite.get("name") or "")


def test_what_is_cut_is_never_the_command(certificate: Certificate) -> None:
    """The longest findings leave the line that shows them again."""
    wrong = Finding(text="x" * 3_000)
    failed = replace(certificate.checks[0], verdict=Verdict.FAIL, findings=(wrong,) * 40, reproduce="specverify again")
    said = ET.fromstring(render_junit(replace(certificate, checks=(failed,)))).findtext(".//failure")
    assert said is not None
    assert "more characters" in said
    assert said.endswith("\n\nReproduce: specverify again")
    assert len(said) < 21_000
