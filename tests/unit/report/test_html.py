"""The HTML report: self-contained, escaped, readable by everyone."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from specverify.records import Plot, PlotKind, Series, Verdict
from specverify.report.html import render_html

if TYPE_CHECKING:
    from specverify.records import Certificate

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Reads a page strictly: every tag closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every such tag."""
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(certificate: Certificate) -> str:
    return render_html(certificate)


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    return Reader(page)


def test_well_formed(read: Reader) -> None:
    """Every element is closed, and every id is there once."""
    assert not read.open
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in read.all("use") + read.all("a"):
        assert (attrs.get("xlink:href") or attrs.get("href") or "")[1:] in ids


def test_deterministic(certificate: Certificate) -> None:
    """The same certificate gives the same bytes."""
    short = replace(certificate, checks=certificate.checks[-2:])
    assert render_html(short) == render_html(short)


def test_asks_nothing_of_the_network(page: str, read: Reader) -> None:
    """No script, no image, no style sheet, no address but the names of XML vocabularies."""
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in read.tags}
    assert {*re.findall(r"https?://[^\s\"'<]+", page)} <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"url\((?!#)|@import", page)
    assert not any(name.startswith("on") for _, attrs in read.tags for name in attrs)


def test_hostile_text_is_text(page: str, read: Reader) -> None:
    """What a prompt says is shown, not obeyed; control characters are gone."""
    assert "<script" not in page
    assert "<script>alert('x')</script> | a\ufffd\ufffd[31mb" in "".join(read.text)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
    assert "x" * 2_000 not in page


def test_a_command_is_whole(certificate: Certificate) -> None:
    """However long its paths are, for it is there to be pasted."""
    command = f"specverify certify {'deep/' * 300}target"
    check = replace(certificate.checks[0], reproduce=command)
    words = "".join(Reader(render_html(replace(certificate, command=command, checks=(check,)))).text)
    assert words.count(command) == 2


def test_verdict_comes_first(read: Reader) -> None:
    """The first heading says the verdict in words, the next line why."""
    words = " ".join("".join(read.text).split())
    assert words.index("FAIL Do not roll this out") < words.index("Claims") < words.index("Evidence")


def test_open_what_failed(read: Reader) -> None:
    """Checks that failed or were not decided are open, the others folded."""
    checks = {str(attrs["class"]): "open" in attrs for attrs in read.all("details") if "class" in attrs}
    assert checks == {"check pass": False, "check fail": True, "check inconclusive": True, "check not_run": False}


def test_for_screen_readers(read: Reader) -> None:
    """Language, landmarks, scoped headers, ordered headings, and a name for each picture and table."""
    assert read.all("html") == [{"lang": "en"}]
    assert {"header", "main", "footer"} <= {tag for tag, _ in read.tags}
    assert all(attrs.get("scope") in ("col", "row") for attrs in read.all("th"))
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    pictures = read.all("svg")
    assert len(pictures) == 4
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in pictures)
    ids = {attrs.get("id") for _, attrs in read.tags}
    assert all(attrs["aria-labelledby"] in ids for attrs in read.all("table"))


def test_paper_and_phones_cut_nothing_off(page: str) -> None:
    """What scrolls on a screen stands whole on paper, and a long name breaks anywhere."""
    assert ".scroll { overflow: visible; }" in page[page.index("@media print") :]
    assert "overflow-wrap: anywhere; }" in page[page.index("body {") : page.index(".page {")]


def test_contrast(page: str) -> None:
    """Every tone reads on its ground at 4.5 to 1 or more, in light and dark."""
    for start in (":root {", "(prefers-color-scheme: dark)"):
        block = page[page.index(start) :]
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block[: block.index("}")]))
        pairs = [(tone, ground) for tone in ("ink", "muted", "link") for ground in ("paper", "raised")]
        pairs += [(tone, f"{tone}-tint") for tone in ("pass", "fail", "inconclusive", "not-run")]
        pairs += [
            (text, f"{tone}-tint") for tone in ("pass", "fail", "inconclusive", "not-run") for text in ("ink", "muted")
        ]
        pairs += [(f"series-{number}", "paper") for number in range(1, 7)]
        for tone, ground in pairs:
            light, dark = sorted((luminance(colours[tone]), luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (start, tone, ground)


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_planted_fault(certificate: Certificate) -> None:
    """A demonstration says so before anything else; a real run doesn't."""
    page = render_html(replace(certificate, fault="accept_leq", checks=()))
    assert page.index("Planted fault &#39;accept_leq&#39;: a demonstration") < page.index("<h1>")
    assert 'class="banner"' not in render_html(replace(certificate, checks=()))


def test_plot_that_cannot_be_drawn(certificate: Certificate) -> None:
    """A broken plot costs its picture, not the report."""
    broken = Plot(
        id="p", title="t", x_label="x", y_label="y", kind=PlotKind.LINE, series=(Series(label="s", x=(1.0,), y=()),)
    )
    check = replace(certificate.checks[0], plots=(broken,), advice="rest")
    assert "can't be drawn" in render_html(replace(certificate, checks=(check,)))
    assert "rest" not in render_html(replace(certificate, checks=(check,)))


def test_same_plot_twice(certificate: Certificate) -> None:
    """Two checks may show the same plot; their ids stay apart."""
    check = replace(certificate.checks[2], plots=certificate.checks[2].plots[:1] * 2, findings=())
    read = Reader(render_html(replace(certificate, checks=(check, check))))
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_every_verdict_and_no_draft(certificate: Certificate) -> None:
    """Each verdict renders, with as little in the certificate as there can be."""
    for verdict in Verdict:
        bare = replace(certificate, verdict=verdict, draft=None, checks=(), plan={}, trust_remote_code=True)
        assert not Reader(render_html(bare)).open
