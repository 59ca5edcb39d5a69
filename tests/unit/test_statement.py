"""A certificate's file is an in-toto Statement that follows from the record in it, and says so when it doesn't."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specverify.codec import dump
from specverify.errors import OutputError
from specverify.plan import Plan
from specverify.records import Plot, PlotKind, Series, Verdict
from specverify.statement import (
    contradictions,
    load_certificate,
    read_certificate,
    read_statement,
    render_statement,
    statement_of,
)
from tests.unit.certificates import certificate_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable

CERTIFICATE = certificate_of()
TEXT = render_statement(CERTIFICATE)


def test_round_trip() -> None:
    """The record comes back as it was, and the same record gives the same bytes."""
    assert load_certificate(TEXT) == CERTIFICATE
    assert render_statement(load_certificate(TEXT)) == TEXT


def test_statement_is_what_in_toto_asks_for() -> None:
    """Type, predicate type, a sha-256 for every file of both models, and the checks by their outcome."""
    raw = json.loads(TEXT)
    assert raw["_type"] == "https://in-toto.io/Statement/v1"
    assert raw["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    subjects = {each["name"]: each["digest"]["sha256"] for each in raw["subject"]}
    assert CERTIFICATE.draft is not None
    assert subjects["target/model.safetensors"] == CERTIFICATE.target.files["model.safetensors"]
    assert subjects["draft/chat_template.jinja"] == CERTIFICATE.draft.files["chat_template.jinja"]
    assert len(subjects) == len(CERTIFICATE.target.files) + len(CERTIFICATE.draft.files)
    assert raw["predicate"]["result"] == "PASSED"
    assert "lossless" in raw["predicate"]["passedTests"]


def test_undecided_is_not_passed() -> None:
    """A tool that knows nothing of specverify must not read INCONCLUSIVE as a pass."""
    raw = json.loads(render_statement(certificate_of(result_of("greedy", Verdict.INCONCLUSIVE))))
    assert raw["predicate"]["result"] == "WARNED"
    assert raw["predicate"]["warnedTests"] == ["greedy"]


def test_a_part_is_not_passed() -> None:
    """Neither is a demonstration; but what failed has failed."""
    part = certificate_of(result_of("greedy"), plan=Plan(only=("greedy",)))
    missed = replace(CERTIFICATE, fault="always-accept")
    for partial in (part, missed):
        assert (partial.verdict, partial.lets_out) == (Verdict.PASS, False)
        assert statement_of(partial)["predicate"]["result"] == "WARNED"
    failed = certificate_of(result_of("greedy", Verdict.FAIL), plan=Plan(only=("greedy",)))
    assert statement_of(failed)["predicate"]["result"] == "FAILED"
    assert CERTIFICATE.lets_out


def test_the_documents_recipe_gives_the_records_digest(tmp_path: Path) -> None:
    """As it stands there, without specverify: with NaN, infinity, lists of numbers, and letters beyond ASCII."""
    text = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    recipe = re.search(r"```python\n(import hashlib.*?)```", text, re.DOTALL)
    assert recipe is not None
    series = Series(label="Σ min(p, q) — é", x=(1.0, 2.0), y=(1e-7, float("nan")), low=(float("-inf"), 0.1))
    plot = Plot(id="p", title="t", x_label="x", y_label="y", kind=PlotKind.LINE, series=(series,))
    drawn = replace(CERTIFICATE, checks=(replace(CERTIFICATE.checks[0], plots=(plot,)), *CERTIFICATE.checks[1:]))
    (tmp_path / "certificate.json").write_text(render_statement(drawn), encoding="utf-8")
    command = [sys.executable, "-I", "-c", recipe[1], str(tmp_path / "certificate.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == statement_of(drawn)["predicate"]["specverify"]["sha256"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["subject"].pop(), "subjects"),
        (lambda raw: raw["subject"][0]["digest"].update(sha256="00"), "subjects"),
        (lambda raw: raw["predicate"].update(result="FAILED"), "result"),
        (lambda raw: raw["predicate"]["failedTests"].append("cost"), "failedTests"),
        (lambda raw: raw["predicate"]["specverify"]["certificate"].update(seed=18), "sha256"),
        (lambda raw: raw["predicate"]["specverify"]["certificate"]["checks"].pop(), "sha256"),
        (lambda raw: raw["predicate"]["specverify"].update(sha256="00"), "sha256"),
    ],
)
def test_a_change_in_one_place_is_seen(change: Callable[[Any], object], said: str) -> None:
    """Whatever is edited by hand contradicts the rest."""
    raw = json.loads(TEXT)
    change(raw)
    assert said in " ".join(contradictions(read_statement(json.dumps(raw))))
    with pytest.raises(OutputError, match="was changed after it was written"):
        load_certificate(json.dumps(raw))


def test_the_file_of_an_older_release_says_to_certify_again() -> None:
    """One sentence, with both schema versions."""
    old = json.loads(dump(CERTIFICATE)) | {"schema_version": 1}
    with pytest.raises(OutputError, match=r"^c was made by an older specverify: it has schema version 1, .*again$"):
        read_statement(json.dumps(old), source="c")
    raw = json.loads(TEXT)
    raw["predicate"]["specverify"]["certificate"]["schema_version"] = 99
    with pytest.raises(OutputError, match=r"^c was made by a newer specverify: .*upgrade specverify$"):
        read_statement(json.dumps(raw), source="c")


def test_files(tmp_path: Path) -> None:
    """A missing file and a folder are named; a good file is read."""
    with pytest.raises(OutputError, match="no such file"):
        read_certificate(tmp_path / "none.json")
    with pytest.raises(OutputError, match="directory"):
        read_certificate(tmp_path)
    (tmp_path / "c.json").write_bytes(b"{\xff")
    with pytest.raises(OutputError, match="not UTF-8: byte 2 is 0xff"):
        read_certificate(tmp_path / "c.json")
    (tmp_path / "c.json").write_text(TEXT)
    assert read_certificate(tmp_path / "c.json") == CERTIFICATE
