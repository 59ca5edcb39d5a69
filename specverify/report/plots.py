"""A `Plot` as SVG text, ready to stand in a page: coloured by the page's CSS variables, so it reads in dark and light.

Note [SVG in a page]: matplotlib draws with placeholder colours, which become `var(--ink, …)` and its like, with a
fallback for an SVG that stands alone. Its ids are prefixed, for several plots share a page; its metadata, which names
addresses, is left out. The same plot gives the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from html import escape
from io import StringIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from specverify.records import PlotKind
from specverify.report.text import at_most, clean, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from specverify.records import Plot, Series

__all__ = ["svg"]

_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_SERIES = tuple(f"#0a0a0{position}" for position in range(1, 7))
_PAGE_COLOURS = {
    _INK: "var(--ink, #1c2024)",
    _MUTED: "var(--muted, #5b6470)",
    _GRID: "var(--grid, #dfe3e8)",
    "#0a0a01": "var(--series-1, #1f5fbf)",
    "#0a0a02": "var(--series-2, #b4490f)",
    "#0a0a03": "var(--series-3, #1a7f5a)",
    "#0a0a04": "var(--series-4, #8a3fa8)",
    "#0a0a05": "var(--series-5, #7a6a00)",
    "#0a0a06": "var(--series-6, #a8325a)",
}
_MARKERS = "osD^vP"
_LONGEST_LABEL = 32
_MOST_POINTS_MARKED = 40
_MOST_LABELS_BELOW = 10
_MOST_POINTS_TOLD = 12
_SETTINGS: dict[Any, Any] = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10.5,
    "text.color": _INK, "axes.labelcolor": _MUTED, "xtick.color": _MUTED, "ytick.color": _MUTED,
    "axes.edgecolor": _MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "grid.linewidth": 0.8,
    "lines.linewidth": 1.8, "legend.frameon": False,
}  # fmt: skip


def svg(plot: Plot, *, prefix: str = "") -> str:
    """The plot as one `<svg>` element whose accessible name says title, caption and numbers; ids begin with `prefix`."""
    digest = hashlib.sha256(repr(plot).encode("utf-8", "replace")).hexdigest()[:10]
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": digest}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks is drawn by the browser
        figure = Figure(figsize=(7.2, _height(plot)), layout="constrained")
        axes = figure.add_subplot()
        _draw(plot, axes)
        _finish(plot, axes)
        drawn = StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(drawn, metadata=metadata)  # type: ignore[no-untyped-call]  # matplotlib is untyped here
    return _for_a_page(drawn.getvalue(), prefix=f"{prefix}p{digest}", label=_told(plot))


def _height(plot: Plot) -> float:
    return min(max(1.3 + 0.3 * _num_bars(plot), 2.0), 12.0) if _sideways(plot) else 3.3


def _num_bars(plot: Plot) -> int:
    return max((len(series.x) for series in plot.series if not series.dashed), default=0)


def _sideways(plot: Plot) -> bool:
    """Whether bars lie, because their names are too long or too many to stand below them."""
    if plot.kind is not PlotKind.BAR:
        return False
    names = [str(x) for series in plot.series if not series.dashed for x in series.x if isinstance(x, str)]
    return bool(names) and (len(names) > _MOST_LABELS_BELOW or max(map(len, names)) > 72 // max(_num_bars(plot), 1))


def _draw(plot: Plot, axes: Axes) -> None:
    measured = [series for series in plot.series if not series.dashed]
    names = _categories(plot)
    for position, series in enumerate(measured):
        colour, marker = _SERIES[position % len(_SERIES)], _MARKERS[position % len(_MARKERS)]
        if plot.kind is PlotKind.BAR:
            _bars(axes, series, position, len(measured), names=names, colour=colour, sideways=_sideways(plot))
        else:
            _points(axes, series, plot.kind, names=names, colour=colour, marker=marker, several=len(measured) > 1)
    for series in plot.series:
        if series.dashed:
            x = _places(series.x, names)
            pair = (series.y, x) if _sideways(plot) else (x, series.y)
            axes.plot(*pair, color=_MUTED, linestyle=(0, (5, 3)), linewidth=1.3, label=_label(series))
    if names and _sideways(plot):
        axes.set_yticks(range(len(names)), [at_most(name, _LONGEST_LABEL) for name in names])
        axes.invert_yaxis()
    elif names:
        axes.set_xticks(range(len(names)), [at_most(name, _LONGEST_LABEL) for name in names])


def _points(
    axes: Axes, series: Series, kind: PlotKind, *, names: Sequence[str], colour: str, marker: str, several: bool
) -> None:
    x, few = _places(series.x, names), len(series.x) <= _MOST_POINTS_MARKED
    if kind is PlotKind.SCATTER:
        axes.plot(x, series.y, marker, color=colour, markersize=4.5, alpha=0.8, label=_label(series))
    else:
        marked: dict[str, Any] = {"marker": marker, "markersize": 4.5, "markevery": 1 if few else max(len(x) // 8, 1)}
        drawn = "steps-post" if kind is PlotKind.STEP else "default"
        axes.plot(
            x, series.y, color=colour, drawstyle=drawn, label=_label(series), **(marked if few or several else {})
        )
    if not _has_interval(series):
        return
    if few or kind is PlotKind.SCATTER:
        axes.vlines(x, series.low, series.high, color=colour, linewidth=1.2, alpha=0.7)
    else:
        axes.fill_between(x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)


def _bars(
    axes: Axes, series: Series, position: int, among: int, *, names: Sequence[str], colour: str, sideways: bool
) -> None:
    thickness = 0.72 / among
    shift = (position - (among - 1) / 2) * thickness
    places = [place + shift for place in _places(series.x, names)]
    draw, whiskers = (axes.barh, axes.hlines) if sideways else (axes.bar, axes.vlines)
    draw(places, series.y, thickness * 0.94, color=colour, alpha=0.85, label=_label(series))
    if _has_interval(series):
        whiskers(places, series.low, series.high, color=_INK, linewidth=1.3)


def _finish(plot: Plot, axes: Axes) -> None:
    sideways = _sideways(plot)
    x_label, y_label = (plot.y_label, plot.x_label) if sideways else (plot.x_label, plot.y_label)
    axes.set_xlabel(at_most(x_label, 90))
    axes.set_ylabel(fill(at_most(y_label, 52), 30))
    if sideways or plot.kind is PlotKind.BAR:
        axes.grid(visible=False, axis="y" if sideways else "x")
    numeric = [x for series in plot.series if not series.dashed for x in series.x if not isinstance(x, str)]
    if numeric and not _categories(plot) and all(math.isfinite(x) and x == int(x) for x in numeric):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    measured = [y for series in plot.series if not series.dashed for y in series.y]
    if all(math.isfinite(y) and y == int(y) for y in measured):  # counts
        (axes.xaxis if sideways else axes.yaxis).set_major_locator(MaxNLocator(integer=True))
        if not any(measured) and not sideways:
            axes.set_ylim(0, 1)
    if not any(len(series.y) for series in plot.series):
        axes.text(0.5, 0.5, "nothing was measured", ha="center", color=_MUTED, transform=axes.transAxes)
    elif len(plot.series) > 1:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        labels = [_label(series) for series in sorted(plot.series, key=lambda series: series.dashed)]
        ordered = [handles[label] for label in labels if label in handles]
        columns = min(max(len(ordered), 1), 3)
        axes.figure.legend(handles=ordered, loc="outside upper left", ncols=columns, labelcolor=_INK, handlelength=2.2)


def _categories(plot: Plot) -> list[str]:
    """The names along x, in their first order, when it holds names; numbers of bars are names too."""
    everything = [x for series in plot.series if not series.dashed for x in series.x]
    if plot.kind is PlotKind.BAR or any(isinstance(x, str) for x in everything):
        return list(dict.fromkeys(_name(x) for x in everything))
    return []


def _places(values: Sequence[float | str], names: Sequence[str]) -> list[float]:
    """Where values lie along x; a reference may give numbers, which are then places between the names."""
    positions = {name: float(position) for position, name in enumerate(names)}
    fallback = [float("nan") if isinstance(value, str) else float(value) for value in values]
    return [positions.get(_name(value), other) for value, other in zip(values, fallback, strict=True)]


def _name(value: float | str) -> str:
    return clean(value) if isinstance(value, str) else f"{value:g}"


def _label(series: Series) -> str:
    label = at_most(series.label, 48)
    return f"\u200b{label}" if label.startswith("_") else label  # matplotlib hides a label that begins with _


def _has_interval(series: Series) -> bool:
    return len(series.low) == len(series.high) == len(series.y) > 0


def _told(plot: Plot) -> str:
    """The plot in words, for whoever doesn't see it: every point of a short series, the telling ones of a long one."""
    return " ".join([f"{plot.title}. {plot.caption}", *(_told_series(series) for series in plot.series if series.y)])


def _told_series(series: Series) -> str:
    places, few = range(len(series.y)), len(series.y) <= _MOST_POINTS_TOLD
    telling = {0, min(places, key=series.y.__getitem__), max(places, key=series.y.__getitem__), places[-1]}
    points = []
    for place in places if few else sorted(telling):
        interval = f" ({number(series.low[place])} to {number(series.high[place])})" if _has_interval(series) else ""
        points.append(f"{number(series.y[place])}{interval} at {_name(series.x[place])}")
    among = "" if few else f", first, lowest, highest and last of {len(places):,} points"
    return f"{at_most(series.label, 48)}{among}: {', '.join(points)}."


def _for_a_page(drawn: str, *, prefix: str, label: str) -> str:
    """Note [SVG in a page]."""
    text = drawn[drawn.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for colour, page_colour in _PAGE_COLOURS.items():
        text = text.replace(colour, page_colour)
    text = text.replace("'DejaVu Sans'", "var(--sans, system-ui), sans-serif")
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(clean(label), quote=True)}"', 1)
