"""A command line that runs in this process, on checks that cost nothing unless a test asks for real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

import specverify.certify
from specverify.checks.check import Check
from specverify.cli import main
from specverify.pairs import embedded
from specverify.records import CheckResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        return json.loads(self.out)

    @property
    def record(self) -> Any:
        """The certificate's record, where that object is a certificate."""
        return self.json["predicate"]["specverify"]["certificate"]


class Run(Protocol):
    """Runs a command line."""

    def __call__(self, *arguments: str | Path) -> Outcome:
        """Its outcome."""
        ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`specverify` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@dataclass
class FakeChecks:
    """Checks that say what they are told, and count how often they were asked."""

    verdicts: dict[str, Verdict]
    raises: dict[str, BaseException]
    asked: list[str]

    def checks(self) -> tuple[Check, ...]:
        """As `certify.CHECKS`."""
        return tuple(self._check(name) for name in self.verdicts)

    def _check(self, name: str) -> Check:
        def conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
            del subject, plan, scored
            self.asked.append(name)
            if name in self.raises:
                raise self.raises[name]
            return CheckResult(id=name, claim=f"{name} holds", verdict=self.verdicts[name], summary=f"{name} was seen")

        return Check(id=name, claim=f"{name} holds", conclude=conclude)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeChecks]:
    """Put checks with these verdicts in place of the real ones."""

    def put(raises: dict[str, BaseException] | None = None, **verdicts: Verdict) -> FakeChecks:
        fake = FakeChecks(verdicts, raises or {}, [])
        monkeypatch.setattr(specverify.certify, "CHECKS", fake.checks())
        return fake

    return put


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of an embedded model, to break."""

    def copy(role: str) -> Path:
        return Path(shutil.copytree(getattr(embedded(), role), tmp_path / f"my-{role}"))

    return copy
