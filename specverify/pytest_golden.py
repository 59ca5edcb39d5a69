"""The part of the pytest plugin with the fixture `golden`, which holds a pair against its golden inside a test suite.

    def test_the_pair_says_what_it_said(golden):
        golden("mine", target="models/target", draft="models/draft")

Nothing heavy is imported until a test uses the fixture. Goldens that no test asks for fail a whole session; a session of
chosen tests is not asked. Under xdist the workers tell the controller what they used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.cli.golden import GoldenRequest
    from specverify.golden.records import GoldenReport

__all__ = ["GoldenChecker", "golden"]

_GOLDEN_FILE = "golden.json"
_LOCK_S = 600
"""Another worker records the same golden at most so long."""


@dataclass
class _Session:
    """What a session, or a worker of one, has seen."""

    used: set[str] = field(default_factory=set)
    asked: int = 0
    """Tests that want the fixture."""
    partial: bool = False
    """Some of the tests were not run, so that nothing is known of what they use."""
    unused: tuple[str, ...] = ()


_SESSION = pytest.StashKey[_Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--specverify-golden-update-new` and `--specverify-goldens`."""
    group = parser.getgroup("specverify goldens")
    group.addoption(
        "--specverify-golden-update-new",
        action="store_true",
        help="Record what has no golden yet; what is recorded stays as it is.",
    )
    group.addoption(
        "--specverify-goldens", metavar="DIR", default=None, help="Folder of the goldens.  [default: golden]"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A session begins."""
    config.stash[_SESSION] = _Session(partial=_chosen(config))


def _chosen(config: pytest.Config) -> bool:
    """Whether somebody chose some of the tests."""
    by_path = config.args_source is pytest.Config.ArgsSource.ARGS and not hasattr(config, "workerinput")
    return bool(by_path or config.getoption("keyword", "") or config.getoption("lf", default=False))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """A marker or a plugin left tests out; only if they want goldens does it matter."""
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.config.stash[_SESSION].partial = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the tests that want the fixture."""
    config.stash[_SESSION].asked += sum("golden" in getattr(item, "fixturenames", ()) for item in items)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that was skipped may have used goldens that now look unused."""
    outcome: Any = yield
    if outcome.get_result().skipped and "golden" in getattr(item, "fixturenames", ()):
        item.config.stash[_SESSION].partial = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it saw; the controller fails a session that leaves goldens unused."""
    config = session.config
    seen = config.stash[_SESSION]
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output["specverify_goldens"] = {"used": sorted(seen.used), "asked": seen.asked, "partial": seen.partial}
        return
    folder = _folder(config)
    if seen.partial or not seen.asked or config.option.collectonly or not folder.is_dir():
        return
    recorded = {path.parent.name for path in folder.glob(f"*/{_GOLDEN_FILE}")}
    seen.unused = tuple(sorted(recorded - seen.used))
    if seen.unused and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - a class of xdist, which may not be installed
    """Add up what the workers saw."""
    told = getattr(node, "workeroutput", {}).get("specverify_goldens", {})
    seen: _Session = node.config.stash[_SESSION]
    seen.used |= set(told.get("used", ()))
    seen.asked += told.get("asked", 0)
    seen.partial |= told.get("partial", False)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401 - pytest keeps its class private
    """Name the unused goldens, and what to do."""
    unused = config.stash[_SESSION].unused
    if unused:
        terminalreporter.section("specverify goldens", red=True)
        terminalreporter.line(
            f"unused: {', '.join(unused)} in {_folder(config)}; delete what no test asks for, or ask for it"
        )


def _folder(config: pytest.Config) -> Path:
    return Path(config.rootpath, config.getoption("--specverify-goldens") or "golden")


# ------------------------------------------------------------------------------------------------ the fixture


@dataclass(frozen=True)
class GoldenChecker:
    """Calls hold a pair against its golden; a change fails the test with the report as its text."""

    config: pytest.Config
    test: str

    def __call__(
        self,
        name: str = "embedded",
        *,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        prompts: Path | None = None,
        max_prompts: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> GoldenReport:
        """The report of a pair that still holds. Without `target`, `name` is an embedded pair."""
        from specverify.cli.golden import MAX_PROMPTS, GoldenRequest  # noqa: PLC0415 - nothing heavy before a test asks
        from specverify.errors import UsageError  # noqa: PLC0415 - as above
        from specverify.golden_file import recorded  # noqa: PLC0415 - as above

        self.config.stash[_SESSION].used.add(name)
        request = GoldenRequest(
            target=name if target is None else str(target),
            draft=None if draft is None else str(draft),
            drafter="prompt-lookup" if target is not None and draft is None else "model",
            prompts=prompts,
            goldens=_folder(self.config),
            name=name,
            max_prompts=max_prompts or MAX_PROMPTS,
            device=device,
            dtype=dtype,
        )
        try:
            return self._report(request)
        except UsageError as error:
            new = "" if recorded(request.folder) else ", or run pytest --specverify-golden-update-new"
            msg = f"{error}{new}"
            raise pytest.fail.Exception(msg, pytrace=False) from None

    def _report(self, request: GoldenRequest) -> GoldenReport:
        from specverify.cli.golden import checked  # noqa: PLC0415 - as above
        from specverify.records import Verdict  # noqa: PLC0415 - as above
        from specverify.report.golden import render_golden  # noqa: PLC0415 - as above
        from specverify.watch import Silent  # noqa: PLC0415 - as above

        if self.config.getoption("--specverify-golden-update-new"):
            self._record_new(request)
        report = checked(request, watch=Silent())
        if report.verdict is not Verdict.PASS:
            pytest.fail(render_golden(report, record_command=request.command("record")), pytrace=False)
        return report

    def _record_new(self, request: GoldenRequest) -> None:
        """Record the golden, or the prompts that it lacks; workers wait for each other."""
        from filelock import FileLock  # noqa: PLC0415 - as above

        from specverify.cli.golden import has_new, record_golden  # noqa: PLC0415 - as above
        from specverify.watch import Silent  # noqa: PLC0415 - as above

        request.goldens.mkdir(parents=True, exist_ok=True)
        lock = request.goldens / f".{request.folder.name}.lock"
        with FileLock(lock, timeout=_LOCK_S):
            if has_new(request):
                record_golden(request, f"new in {self.test}", update=False, watch=Silent())
        lock.unlink(missing_ok=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> GoldenChecker:
    """Hold a pair against its golden: `golden("mine", target=..., draft=...)`."""
    return GoldenChecker(request.config, request.node.nodeid)
