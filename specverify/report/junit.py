"""JUnit XML of a certificate, for the test views of GitHub, GitLab and Jenkins: one test case a check.

Note [JUnit and exit codes]: a CI job must be as red as its JUnit file. `specverify` exits with 1 on FAIL and 3 on
INCONCLUSIVE, and both are red in CI, so both are a `<failure>`, told apart by `type` ("fail", "inconclusive") and by
the first word of the message. `<skipped>` would show a claim that could not be settled as harmless, and `<error>` as a
crash of specverify. NOT_RUN is `<skipped>`. A demonstration with a planted fault says so in the suite's name.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from specverify.records import Verdict
from specverify.report import text

if TYPE_CHECKING:
    from specverify.records import Certificate, CheckResult

__all__ = ["render_junit"]

_TYPES = {Verdict.FAIL: "fail", Verdict.INCONCLUSIVE: "inconclusive"}
_MOST_FINDINGS = 50
_MOST_CHARACTERS = 20_000


def render_junit(certificate: Certificate) -> str:
    """The certificate as JUnit XML, UTF-8, with its declaration."""
    root = ET.Element("testsuites", name="specverify")
    suite = ET.SubElement(root, "testsuite", name=_suite_name(certificate), hostname="localhost")
    verdicts = [result.verdict for result in certificate.checks]
    for part in (root, suite):
        part.set("tests", str(len(verdicts)))
        part.set("failures", str(sum(verdict in _TYPES for verdict in verdicts)))
        part.set("errors", "0")
        part.set("time", f"{certificate.elapsed_s:.3f}")
    suite.set("skipped", str(verdicts.count(Verdict.NOT_RUN)))  # Jenkins' junit-10.xsd has none of `testsuites`
    suite.set("timestamp", certificate.created.removesuffix("+00:00"))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(certificate).items():
        ET.SubElement(properties, "property", name=name, value=text.clean(value))
    for result in certificate.checks:
        suite.append(_case(result, seed=certificate.seed))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _suite_name(certificate: Certificate) -> str:
    name = f"specverify: {text.versus(certificate)}"
    return f"{name} [planted fault: {text.clean(certificate.fault)}]" if certificate.fault else name


def _properties(certificate: Certificate) -> dict[str, str]:
    return {
        "verdict": certificate.verdict,
        "headline": certificate.headline,
        "engine": certificate.engine,
        "seed": str(certificate.seed),
        "plan_sha256": certificate.plan_sha256,
        "target_weights_sha256": certificate.target.weights_sha256,
        "draft_weights_sha256": certificate.draft.weights_sha256 if certificate.draft else "",
    }


def _case(result: CheckResult, *, seed: int) -> ET.Element:
    case = ET.Element("testcase", classname="specverify", name=text.clean(result.id), time=f"{result.elapsed_s:.3f}")
    message = f"{text.LABELS[result.verdict]}: {text.at_most(result.summary, 500)}"
    if result.verdict in _TYPES:
        failed = ET.SubElement(case, "failure", type=_TYPES[result.verdict], message=message)
        failed.text = text.failure(result, seed=seed, most_findings=_MOST_FINDINGS, most=_MOST_CHARACTERS)
    elif result.verdict is Verdict.NOT_RUN:
        ET.SubElement(case, "skipped", message=text.at_most(result.summary, 500))
    else:
        ET.SubElement(case, "system-out").text = text.clean(f"{result.claim}: {result.summary}")
    return case
