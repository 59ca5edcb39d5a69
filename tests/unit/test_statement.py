"""A certificate's file is an in-toto Statement that follows from the record in it, and says so when it doesn't."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from specverify.codec import dump
from specverify.errors import OutputError
from specverify.records import Verdict
from specverify.statement import (
    contradictions,
    load_certificate,
    read_certificate,
    read_statement,
    render_statement,
)
from tests.unit.certificates import certificate_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
