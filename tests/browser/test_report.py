"""The report in a real browser, headless: no complaint on its console, both colour schemes, and nothing folded in print."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specverify.records import Plot, PlotKind, Series
from specverify.report.html import render_html
from tests.unit.certificates import certificate_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

PLOT = Plot(
    id="p", title="Acceptance", x_label="position", y_label="share", kind=PlotKind.BAR,
    series=(Series(label="accepted", x=(1.0, 2.0, 3.0), y=(0.7, 0.5, 0.3)),),
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with plots, compared with another."""
    made = certificate_of()
    made = replace(made, checks=tuple(replace(check, plots=(PLOT,)) for check in made.checks))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(made, replace(made, seed=3, environment=replace(made.environment, torch="2.1"))))
    return path


def browse(page: Path, *options: str) -> str:
    """What the browser says on its log."""
    assert BROWSER is not None
    profile = page.parent / "profile"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--window-size=1000,1200",
        f"--user-data-dir={profile}", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def picture(page: Path, *options: str) -> np.ndarray:
    """A screenshot, as bytes of red, green and blue."""
    from matplotlib.image import imread

    file = page.parent / "shot.png"
    assert browse(page, f"--screenshot={file}", *options) == ""
    return (imread(file)[..., :3] * 255).round().astype(int)


@pytest.mark.parametrize(
    ("options", "paper"), [((), (255, 255, 255)), (("--blink-settings=preferredColorScheme=0",), (20, 23, 26))]
)
def test_light_and_dark(page: Path, options: tuple[str, ...], paper: tuple[int, ...]) -> None:
    """The ground is the scheme's, text is on it, and the console is silent."""
    shot = picture(page, *options)
    assert tuple(shot[-1, -1]) == paper
    assert len({tuple(pixel) for pixel in shot[::7, ::7].reshape(-1, 3)}) > 20


def test_print_unfolds_the_evidence(page: Path) -> None:
    """Each check's plot is on paper though it is folded on the screen: many pages instead of one or two."""
    file = page.parent / "report.pdf"
    assert browse(page, f"--print-to-pdf={file}") == ""
    pages = len(re.findall(rb"/Type\s*/Page[^s]", file.read_bytes()))
    folded = page.parent / "folded.html"
    folded.write_text(page.read_text().replace("details::details-content {", "details::none {"))
    browse(folded, f"--print-to-pdf={file}")
    assert pages > len(re.findall(rb"/Type\s*/Page[^s]", file.read_bytes()))


def test_a_script_would_be_heard_of(page: Path) -> None:
    """The planted fault: the page's own policy forbids a script, and the console says so."""
    spoiled = page.parent / "spoiled.html"
    spoiled.write_text(page.read_text().replace("</main>", "<script>alert(1)</script></main>"))
    assert "Content Security Policy" in browse(spoiled, f"--screenshot={page.parent / 'shot.png'}")
