"""A certificate's file: an in-toto Statement about every file of target and draft, so that any supply-chain tool reads it.

Note [Statement]: the predicate is the vetted `test-result`; our own record is nested in it whole, under `specverify`, an
extension field that other tools ignore. Everything outside that record is derived from it, and the digest beside it
is of its canonical JSON, so whoever changes one place must change them all. Only a signature catches somebody who
does (docs/gate.md).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specverify.codec import canonical, dump, load, read_text, refuse_other_versions, require_shallow, without_repeats
from specverify.errors import OutputError
from specverify.records import Certificate, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "PREDICATE_TYPE",
    "STATEMENT_TYPE",
    "Statement",
    "contradictions",
    "load_certificate",
    "open_statement",
    "read_certificate",
    "read_statement",
    "render_statement",
    "statement_of",
]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
_RESULTS = {Verdict.PASS: "PASSED", Verdict.FAIL: "FAILED", Verdict.INCONCLUSIVE: "WARNED", Verdict.NOT_RUN: "WARNED"}
"""The predicate knows three words; what is not decided, or not the whole, must not read as passed."""
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement as it was read, with the record that it holds."""

    raw: Mapping[str, Any]
    certificate: Certificate


def statement_of(certificate: Certificate) -> dict[str, Any]:
    """The statement of a certificate: everything in it follows from the record."""
    record = dump(certificate)
    named = {"plan": certificate.plan_sha256, "prompts": certificate.prompts_sha256}
    return {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(certificate),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": _RESULTS[
                certificate.verdict if certificate.whole or certificate.verdict is Verdict.FAIL else Verdict.NOT_RUN
            ],
            "configuration": [{"name": name, "digest": {"sha256": each}} for name, each in named.items() if each],
            "passedTests": _names(certificate, Verdict.PASS),
            "warnedTests": _names(certificate, Verdict.INCONCLUSIVE),
            "failedTests": _names(certificate, Verdict.FAIL),
            "specverify": {
                "certificate": json.loads(record),
                "sha256": hashlib.sha256(record.encode()).hexdigest(),
            },
        },
    }


def render_statement(certificate: Certificate) -> str:
    """The text of `certificate.json`: sorted keys, two spaces, UTF-8; the same certificate gives the same bytes."""
    return canonical(statement_of(certificate))


def read_certificate(path: str | Path) -> Certificate:
    """The record in a certificate's file; raises `OutputError` where there is none, or where it contradicts itself."""
    return load_certificate(_read(path), source=str(path))


def open_statement(path: str | Path) -> Statement:
    """As `read_statement`, from a file."""
    return read_statement(_read(path), source=str(path))


def load_certificate(text: str, *, source: str = "the certificate") -> Certificate:
    """As `read_certificate`, from the text."""
    statement = read_statement(text, source=source)
    if wrong := contradictions(statement):
        msg = f"{source} was changed after it was written: {wrong[0]}; certify the pair again"
        raise OutputError(msg)
    return statement.certificate


def read_statement(text: str, *, source: str = "the certificate") -> Statement:
    """A statement with its record, as it stands: what it says of itself is for `contradictions` to judge.

    Raises `OutputError` for anything else, and for a certificate of another schema version.
    """
    require_shallow(text, source, OutputError)
    try:
        raw = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        msg = f"{source} is not JSON that specverify wrote: {error}"
        raise OutputError(msg) from error
    if isinstance(raw, dict) and "schema_version" in raw and "_type" not in raw:
        try:
            refuse_other_versions(raw)
        except OutputError as error:
            msg = f"{source} was {error}"
            raise OutputError(msg) from error
    predicate = raw.get("predicate") if isinstance(raw, dict) else None
    ours = predicate.get("specverify") if isinstance(predicate, dict) else None
    record = ours.get("certificate") if isinstance(ours, dict) else None
    if record is None or raw.get("_type") != STATEMENT_TYPE or raw.get("predicateType") != PREDICATE_TYPE:
        msg = (
            f"{source} is no certificate of specverify (an in-toto Statement with a test-result); give certificate.json"
        )
        raise OutputError(msg)
    try:
        certificate = load(json.dumps(record), source=source)
    except OutputError as error:
        known = str(error)
        msg = known if known.startswith(source) else f"{source} was {known}"
        raise OutputError(msg) from error
    return Statement(raw=raw, certificate=certificate)


def _read(path: str | Path) -> str:
    return read_text(path, "the certificate", OutputError, most_bytes=_MOST_BYTES)


def contradictions(statement: Statement) -> list[str]:
    """Where the statement is not the one of its own record; each in a few words."""
    expected, found = statement_of(statement.certificate), statement.raw
    wrong = []
    if found["predicate"]["specverify"].get("sha256") != expected["predicate"]["specverify"]["sha256"]:
        wrong.append("its record is not the one that its sha256 was taken of")
    if found.get("subject") != expected["subject"]:
        wrong.append("its subjects are not the files that its record names")
    wrong += [
        f"its {key} is not what its record says"
        for key in ("result", "configuration", "passedTests", "warnedTests", "failedTests")
        if found["predicate"].get(key) != expected["predicate"][key]
    ]
    if found["predicate"]["specverify"].get("certificate") != expected["predicate"]["specverify"]["certificate"]:
        wrong.append("its record is not written as specverify writes it")
    return wrong


def _subjects(certificate: Certificate) -> list[dict[str, Any]]:
    """Each file of target and draft; a model that came from no folder is named by the digest of its tensors."""
    subjects = []
    for role, model in (("target", certificate.target), ("draft", certificate.draft)):
        if model is None:
            continue
        digests = model.files or {"tensors": model.weights_sha256 or hashlib.sha256(model.name.encode()).hexdigest()}
        subjects += [{"name": f"{role}/{name}", "digest": {"sha256": each}} for name, each in sorted(digests.items())]
    return subjects


def _names(certificate: Certificate, verdict: Verdict) -> list[str]:
    return [result.id for result in certificate.checks if result.verdict is verdict]
