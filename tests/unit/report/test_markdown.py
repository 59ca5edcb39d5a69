"""Markdown for a pull request: always short enough, and never more than text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.records import Finding, Verdict
from specverify.report.markdown import MOST_CHARACTERS, escape, render_markdown

if TYPE_CHECKING:
    from specverify.records import Certificate


def test_says_it(certificate: Certificate) -> None:
    """Verdict, headline, a row a check, and what failed with its command."""
    text = render_markdown(certificate)
    assert text.startswith("## ❌ FAIL: SmolLM2-1.7B-Instruct with SmolLM2-135M-Instruct\n")
    assert "**Do not roll this out: lossless failed.**" in text
    assert text.count("\n| ") == 1 + len(certificate.checks)
    assert "```shell\nspecverify certify pair/ --only lossless --seed 17\n```" in text
    assert text.count("<details") == text.count("</details>") == 2


def test_cells(certificate: Certificate, hostile: str) -> None:
    """A cell stays a cell: pipes, new lines, HTML and mentions are text."""
    check = replace(certificate.checks[0], id=hostile, summary=f"{hostile}\nnext", sample_unit=hostile)
    text = render_markdown(replace(certificate, checks=(check,)))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert "<script" not in text
    assert "@team" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a_b*c", r"a\_b\*c"),
        ("- a", "\u2060- a"),
        ("1. a", "\u20601. a"),
        ("1.0e-12 TV distance", "1.0e-12 TV distance"),
        ("-0.8 nats", "-0.8 nats"),
        ("#12", "\u2060#\u206012"),
        ("\\|", r"\\\|"),
        ("&lt;", "&amp;lt;"),
    ],
)
def test_escape(content: str, said: str) -> None:
    """Markup is text, and a number is copied as it reads."""
    assert escape(content) == said


@pytest.mark.parametrize("num_checks", [1, 5, 2_000])
def test_always_short_enough(certificate: Certificate, num_checks: int) -> None:
    """Whatever the certificate holds, GitHub takes the summary, and what is left out is counted."""
    nasty = "<&|@" * 5_000
    check = replace(
        certificate.checks[0], id=nasty, claim=nasty, summary=nasty, advice=nasty, sample_unit=nasty,
        reproduce="`" * 90_000, verdict=Verdict.FAIL, tests=certificate.checks[2].tests * 500,
        findings=tuple(Finding(text=nasty, place=nasty) for _ in range(3_000)),
    )  # fmt: skip
    target = replace(certificate.target, name=nasty)
    text = render_markdown(
        replace(certificate, checks=(check,) * num_checks, headline=nasty, engine=nasty, fault=nasty, target=target)
    )
    assert len(text) < MOST_CHARACTERS
    assert "more" in text
    assert text.count("<details") == text.count("</details>")


def test_planted_fault(certificate: Certificate) -> None:
    """A demonstration says so at the top."""
    text = render_markdown(replace(certificate, fault="accept_leq", draft=None))
    assert text.index("> [!CAUTION]\n> Planted fault") < text.index("| Check")
