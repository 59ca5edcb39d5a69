"""A certificate as one HTML page: no script, nothing computed. A manager reads the top, an engineer the rest."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from specverify.records import Verdict
from specverify.report import text
from specverify.report.changes import changes, comparable
from specverify.report.plots import svg

if TYPE_CHECKING:
    from jinja2 import Template

    from specverify.records import Certificate, CheckResult, Plot

__all__ = ["render_html"]

_MOST_FINDINGS = 200
_MOST_CHARACTERS = 800
"""Of one text in the page; the certificate holds all of it."""
_WORDS = {
    Verdict.PASS: "passed",
    Verdict.FAIL: "failed",
    Verdict.INCONCLUSIVE: "not decided",
    Verdict.NOT_RUN: "not run",
}


def render_html(certificate: Certificate, last: Certificate | None = None) -> str:
    """The report as one self-contained HTML page, compared with the `last` certificate of the pair where there is one.

    The same certificates give the same bytes.
    """
    compared = last if comparable(last, certificate) else None
    return _template().render(
        certificate=certificate,
        last=compared,
        changes=changes(compared, certificate) if compared is not None else [],
        counts=_counts(certificate),
        facts=_facts(certificate),
        models=_models(certificate),
        plan=list(text.settings(certificate.plan)),
        banner=text.planted(certificate),
        title=f"{text.LABELS[certificate.verdict]}: {text.versus(certificate)}",
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.globals.update(
        Verdict=Verdict, LABELS=text.LABELS, MARKS=text.MARKS, MOST_FINDINGS=_MOST_FINDINGS,
        command=_command, detectable=text.detectable, duration=text.duration, figures=_figures, measurement=text.measurement,
        number=text.number, rate=text.rate, samples=text.samples, test_row=text.test_row,
    )  # fmt: skip
    return environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))


def _printable(value: object) -> object:
    """What the page prints of a value: no control characters, no endless text."""
    return (
        value if isinstance(value, Markup) or not isinstance(value, str) else text.clean(value, most=_MOST_CHARACTERS)
    )


def _command(words: str) -> Markup:
    """All of a command, however long: half of one can't be pasted."""
    return escape(text.clean(words))


def _figures(result: CheckResult, place: int) -> list[tuple[Plot, Markup]]:
    """Each plot with its picture; one that can't be drawn says so, for the rest of the report is worth having."""
    return [(plot, _picture(plot, prefix=f"c{place}-{index}-")) for index, plot in enumerate(result.plots)]


def _picture(plot: Plot, *, prefix: str) -> Markup:
    try:
        return Markup(svg(plot, prefix=prefix))  # noqa: S704 - matplotlib escapes every text that it draws
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Markup("<p class='missing'>This plot can't be drawn: {}</p>").format(text.clean(str(error), most=200))


def _counts(certificate: Certificate) -> str:
    """How many checks ended in each way, in one line."""
    verdicts = [result.verdict for result in certificate.checks]
    return ", ".join(f"{verdicts.count(verdict)} {word}" for verdict, word in _WORDS.items() if verdict in verdicts)


def _facts(certificate: Certificate) -> list[tuple[str, str]]:
    facts = [
        ("Target", certificate.target.name),
        ("Draft", certificate.draft.name if certificate.draft else "none"),
        ("Engine", certificate.engine),
        ("Run on", f"{certificate.environment.device}, {certificate.environment.dtype}"),
        ("Made", f"{certificate.created.replace('T', ' ').replace('+00:00', ' UTC')}"),
        ("Took", f"{text.duration(certificate.elapsed_s)}, seed {certificate.seed}"),
    ]
    return [(label, value) for label, value in facts if value]


def _models(certificate: Certificate) -> list[tuple[str, str, str]]:
    """The two fingerprints side by side: label, target's, draft's."""
    target, draft = certificate.target, certificate.draft
    names = ("name", "architecture", "num_parameters", "vocab_size")
    digests = ("weights_sha256", "tokenizer_sha256", "template_sha256", "config_sha256")
    rows = [
        (name, text.number(getattr(target, name)), text.number(getattr(draft, name)) if draft else text.NONE)
        for name in names + digests
    ]
    file_names = sorted({*target.files, *(draft.files if draft else ())})
    rows += [
        (name, target.files.get(name, text.NONE), draft.files.get(name, text.NONE) if draft else text.NONE)
        for name in file_names
    ]
    return rows
