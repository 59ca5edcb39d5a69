"""Finished checks and answered rounds on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from specverify.certify import environment
from specverify.cli.rounds import Rounds
from specverify.codec import dump, load_as, write_text_atomically
from specverify.errors import OutputError
from specverify.plan import plan_digest
from specverify.records import SCHEMA_VERSION, CheckResult
from specverify.redaction import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import ModelFingerprint
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["CHECKPOINT", "Checkpoint", "FileStore", "run_key"]

CHECKPOINT = "checkpoint.json"
"""The file's name beside the certificate."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The checks that a run has finished."""

    schema_version: int = SCHEMA_VERSION
    key: str
    """Of the run; results of another run are never taken over."""
    results: tuple[CheckResult, ...]


def run_key(
    subject: Subject, plan: Plan, digests: tuple[ModelFingerprint, ModelFingerprint | None], *, fault: str
) -> str:
    """sha-256 of all that decides what a run shows: plan, models, prompts, command, fault, engine, machine, versions."""
    decisive = {
        "plan": plan_digest(plan),
        "models": [asdict(model) for model in digests if model is not None],
        "prompts": [asdict(prompt) for prompt in subject.prompts],
        "command": subject.command,
        "engine": subject.engine.name,
        "fault": fault,
        "environment": asdict(environment(subject.target.device, "")),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


class FileStore:
    """A `certify.Store` in one file, rewritten whole after each check."""

    def __init__(self, folder: Path, key: str, *, resume: bool, say: Callable[[str], None]) -> None:
        """Take over what a run with the same key has finished, and `say` so."""
        self.path = folder / CHECKPOINT
        self._key = key
        self._results: dict[str, CheckResult] = {}
        self._rounds = Rounds(folder, key, resume=resume)
        if resume and self.path.is_file():
            self._results = self._kept(say)

    def get(self, check_id: str) -> CheckResult | None:
        """The result of the same check in the same run, if it was finished."""
        return self._results.get(check_id)

    def put(self, result: CheckResult) -> None:
        """Keep a result; raises `OutputError` when it can't be written."""
        self._results[result.id] = result
        write_text_atomically(
            self.path, dump(without_secrets(Checkpoint(key=self._key, results=tuple(self._results.values()))))
        )

    def recall(self, asked: Round) -> ScoredTraces | None:
        """The answers to a round of the same run, if they were kept."""
        return self._rounds.get(_digest(asked), asked)

    def keep(self, asked: Round, scored: ScoredTraces) -> None:
        """Keep the answers to a round; raises `OutputError` when they can't be written."""
        self._rounds.put(_digest(asked), asked, scored)

    def scratch(self) -> Path:
        """Where the results go, too."""
        return self.path.parent

    def finish(self) -> None:
        """All checks are kept, so their rounds need not be."""
        self._rounds.remove()

    def remove(self) -> None:
        """The run is complete: nothing is left to resume."""
        self.finish()
        self.path.unlink(missing_ok=True)

    def _kept(self, say: Callable[[str], None]) -> dict[str, CheckResult]:
        try:
            checkpoint = load_as(Checkpoint, self.path.read_text(encoding="utf-8"), source=str(self.path))
        except (OutputError, OSError, UnicodeDecodeError):
            say(f"note: {self.path} can't be read as a checkpoint and is ignored")
            return {}
        if checkpoint.key != self._key or checkpoint.schema_version != SCHEMA_VERSION:
            say(
                f"note: {self.path} is of another run (other models, plan, options or versions): this one begins anew and replaces it"
            )
            return {}
        names = ", ".join(result.id for result in checkpoint.results)
        say(f"resumed from {self.path}: {names} {'is' if len(checkpoint.results) == 1 else 'are'} not run again")
        return {result.id: result for result in checkpoint.results}


def _digest(asked: Round) -> str:
    """Of a round: its requests, and whether they are scored."""
    plain = [type(asked).__name__ == "Unscored", *(asdict(request) for request in asked)]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
