"""Plots: any data draws, the same data draws the same, any text is text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from specverify.records import Plot, PlotKind, Series
from specverify.report.plots import svg


def plot(kind: PlotKind, *series: Series, label: str = "x") -> Plot:
    """A plot of `series`."""
    return Plot(id="p", title="Title", x_label=label, y_label="y", kind=kind, series=series, caption="How to read it.")


NUMBERS = Series(
    label="s", x=(1.0, 2.0, 3.0), y=(1.0, float("nan"), 3.0), low=(0.0, 1.0, 2.0), high=(2.0, 3.0, float("inf"))
)
NAMES = Series(label="t", x=("a", "b", "a name that is far too long to stand below a bar"), y=(1.0, 2.0, 3.0))
EMPTY = Series(label="e", x=(), y=())
LIMIT = Series(label="limit", x=(1.0, 2.0), y=(1.0, 1.0), dashed=True)


@pytest.mark.parametrize("kind", PlotKind)
@pytest.mark.parametrize("series", [(), (EMPTY, LIMIT), (NUMBERS, NUMBERS, LIMIT), (NAMES, LIMIT)])
def test_draws(kind: PlotKind, series: tuple[Series, ...]) -> None:
    """Every kind draws numbers, names, intervals, references and nothing, as XML in the page's colours."""
    drawn = svg(plot(kind, *series))
    root = ET.fromstring(drawn)
    assert (root.get("aria-label") or "").startswith("Title. How to read it.")
    assert root.get("viewBox")
    assert "var(--" in drawn
    assert "#0a0a0" not in drawn.replace("fallback", "")


def test_the_numbers_are_said() -> None:
    """Whoever doesn't see the picture hears its numbers: all of a few, the telling ones of many."""
    many = Series(label="many", x=tuple(map(float, range(100))), y=tuple(float(-abs(x - 40)) for x in range(100)))
    drawn = svg(plot(PlotKind.LINE, replace(NUMBERS, y=(1.0, 0.5, 3.0)), many, LIMIT))
    assert (ET.fromstring(drawn).get("aria-label") or "").split(" How to read it. ")[1] == (
        "s: 1 (0 to 2) at 1, 0.5 (1 to 3) at 2, 3 (2 to infinite) at 3. "
        "many, first, lowest, highest and last of 100 points: -40 at 0, 0 at 40, -59 at 99. limit: 1 at 1, 1 at 2."
    )


def test_counts_have_whole_ticks_and_begin_at_zero() -> None:
    """No 2.5 answers, and no -0.04 differing ids where there are none."""

    def ticks(*y: float) -> set[str]:
        drawn = ET.fromstring(svg(Plot(
            id="n", title="N", x_label="", y_label="", kind=PlotKind.STEP, series=(Series(label="n", x=(0.5, 1.5), y=y),),
        )))  # fmt: skip
        groups = [each for each in drawn.iter() if "ytick" in each.get("id", "")]
        return {text.text or "" for group in groups for text in group.iter() if text.tag.endswith("text")}

    assert ticks(0, 0) == {"0", "1"}
    assert {"0", "1", "2", "3"} >= ticks(0, 3) >= {"0", "3"}
    assert any("." in tick for tick in ticks(0.0, 2.5))


def test_deterministic_and_apart() -> None:
    """The same plot gives the same bytes; two plots share no id, so they can share a page."""
    one, other = svg(plot(PlotKind.LINE, NUMBERS)), svg(plot(PlotKind.LINE, NUMBERS, label="z"))
    assert one == svg(plot(PlotKind.LINE, NUMBERS))
    assert not ids(one) & ids(other)


def ids(drawn: str) -> set[str]:
    """All ids in an SVG."""
    return {each.get("id", "") for each in ET.fromstring(drawn).iter() if each.get("id")}


def test_text_is_text(hostile: str) -> None:
    """No label becomes markup or a formula, whatever it holds, other scripts included."""
    series = Series(label=f"_{hostile} 你好", x=(hostile, "b"), y=(1.0, 2.0))
    drawn = svg(plot(PlotKind.BAR, series, LIMIT, label=hostile))
    words = "".join(ET.fromstring(drawn).itertext())
    assert "<script>alert('x')" in words
    assert "<script" not in drawn
