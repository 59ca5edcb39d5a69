"""The pytest plugin: a pair, an engine, and two assertions about them, under one error budget for the whole session.

Neither torch nor transformers is imported until a fixture is used. Registered under its own module name, so that a checkout's
`conftest.py` may name it too.

Note [Error budget of a session]: all assertions of a session together raise a false alarm in at most
`--specverify-false-fail-rate` of the sessions. Every test that names an assertion has an even share (they are counted after
collection, so all xdist workers agree), and its k-th assertion spends 2^-k of that, however many there are.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import warnings
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specverify import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.engines import Engine
    from specverify.models.loading import Pair
    from specverify.pytest_assertion import Assertion
    from specverify.subject import Subject

pytest_plugins = ["specverify.pytest_golden"]

ASSERTIONS = {"assert_lossless": "lossless", "assert_greedy_exact": "greedy"}
"""The check behind each fixture."""
PROPERTY = "specverify"
"""The user property that carries results to the terminal, from xdist's workers too, and into JUnit."""
DEFAULT_SEED = 17
DEFAULT_RATE = 1e-6
_QUICK_TOKENS = 5_000  # of the quick budget, which assertions use
_SHARES = pytest.StashKey["dict[str, float]"]()
_MOST_LISTED = 30
_PATHS = {f"--specverify-{name}" for name in ("target", "draft", "goldens", "xfails")}
"""Options whose value may be a path."""


# ---------------------------------------------------------------------------------------------- options and header


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is under test, the seed, and the error budget."""
    group = parser.getgroup("specverify", "speculative decoding held against its target")
    add = group.addoption
    add("--specverify-target", metavar="MODEL", help="folder or hub name of the target [default: the embedded pair]")
    add("--specverify-draft", metavar="MODEL", help="folder or hub name of the draft [default: prompt lookup]")
    add("--specverify-engine", metavar="NAME", help="engine under test, or module:callable [default: reference]")
    add("--specverify-engine-option", metavar="K=V", action="append", default=[], help="a setting of the engine")
    add("--specverify-rule", metavar="MODULE:FUNCTION", help="the verifier that properties/ holds its claims on")
    add("--specverify-shape", metavar="NAME", help="how that verifier is called, where its parameters don't say")
    add("--specverify-seed", metavar="S", type=int, help=f"of all randomness [default: {DEFAULT_SEED}]")
    add("--specverify-vary-seed", action="store_true", help="another seed each session; the header prints it")
    add(
        "--specverify-false-fail-rate",
        metavar="RATE",
        type=float,
        default=DEFAULT_RATE,
        help=f"false alarms in a session, all assertions together [default: {DEFAULT_RATE:g}]",
    )
    add(
        "--specverify-xfails",
        metavar="FILE",
        help="ids of tests that are known to fail, one a line, `# reason` after it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and the session's seed: an xdist worker takes over the one of its controller."""
    config.addinivalue_line(
        "markers", "specverify_plan(reason, **fields): fields of the plan for the assertions of this test, and why"
    )
    config.addinivalue_line(
        "markers", "specverify_needs(*capabilities, reason): skipped, with the reason, where the engine lacks one"
    )
    if mistake := _mistake(config):
        raise pytest.UsageError(mistake)
    given = getattr(config, "workerinput", {}).get("specverify_seed")
    if given is not None:
        config.option.specverify_seed = given
    elif config.getoption("specverify_vary_seed"):
        config.option.specverify_seed = secrets.randbits(31)


def _mistake(config: pytest.Config) -> str:
    """What is wrong with the options, as far as it shows without torch; empty if nothing is."""
    option = config.getoption
    rate, seed = option("specverify_false_fail_rate"), option("specverify_seed")
    if not 0 < rate < 1:
        return f"--specverify-false-fail-rate is {rate}; it must lie between 0 and 1"
    if seed is not None and option("specverify_vary_seed") and not _worker(config):
        return "--specverify-seed and --specverify-vary-seed exclude each other; drop one"
    if seed is not None and not 0 <= seed < 2**64:
        return f"--specverify-seed is {seed}; it must be at least 0 and below 2^64"
    if option("specverify_draft") and not option("specverify_target"):
        return "--specverify-draft has no target; add --specverify-target, or leave both out for the embedded pair"
    if option("specverify_engine_option") and not option("specverify_engine"):
        return "--specverify-engine-option is for an engine; say which with --specverify-engine"
    return "" if _worker(config) or config.inipath else _led_astray(config)


def _led_astray(config: pytest.Config) -> str:
    """Before it knows our options, pytest takes a path after one for a place of tests, and looks for its own file there."""
    here = config.invocation_params.dir
    for option, word in pairwise(config.invocation_params.args):
        path = here / word
        if option in _PATHS and path.exists() and here not in path.parents:
            return (
                f"write {option}={word}: with a blank, pytest looks for its own configuration there, not in this folder"
            )
    return ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401 - xdist's, which may not be installed
    """Every worker of xdist uses the seed that the header printed."""
    node.workerinput["specverify_seed"] = node.config.getoption("specverify_seed")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The truth first: subject, versions, seed, and what can be detected."""
    target, draft = config.getoption("specverify_target"), config.getoption("specverify_draft")
    subject = f"{target} with {draft or 'prompt lookup'}" if target else "the embedded pair"
    rate = config.getoption("specverify_false_fail_rate")
    seen = math.sqrt(math.log(2 / rate) / (2 * _QUICK_TOKENS)) + math.sqrt(math.log(10) / (2 * _QUICK_TOKENS))
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    spent = f"seed {seed_of(config)}, false alarms at most {rate:g} a session"
    return [
        f"specverify {__version__}: {subject}, engine {config.getoption('specverify_engine') or 'reference'}, {versions}",
        f"specverify: {spent}; {_QUICK_TOKENS:,} tokens show a shift of the mean law from {seen:.2g} on, at best",
    ]


def seed_of(config: pytest.Config) -> int:
    """The session's seed."""
    given = config.getoption("specverify_seed")
    return DEFAULT_SEED if given is None else int(given)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# ---------------------------------------------------------------------------------------------- collection


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Markers without a reason are refused; tests that are known to fail are marked, and unmatched ids warned of."""
    for item in items:
        for marker in (*item.iter_markers("specverify_plan"), *item.iter_markers("specverify_needs")):
            if not str(marker.kwargs.get("reason", "")).strip():
                msg = f"{item.nodeid}: the marker {marker.name} needs reason='…'"
                raise pytest.UsageError(msg)
        for name in (name for marker in item.iter_markers("specverify_needs") for name in marker.args):
            _require_known(item, name)
    if file := config.getoption("specverify_xfails"):
        unmatched = _mark_known_failures(_known_failures(Path(file)), items)
        if _worker(config) in {"", "gw0"}:
            _warn_of(_gone(unmatched, config, items))


def _require_known(item: pytest.Item, name: object) -> None:
    """A misspelt capability would skip its test for ever. Raises `UsageError` with the nearest name."""
    from specverify.engines import Capability  # noqa: PLC0415 - as above

    known = [*map(str, Capability)]
    if name not in known:
        near = get_close_matches(str(name), known, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        msg = f"{item.nodeid}: the marker specverify_needs names no capability '{name}'; {hint}"
        raise pytest.UsageError(msg)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The share of each test that names an assertion (Note [Error budget of a session])."""
    asserting = [item.nodeid for item in session.items if {*getattr(item, "fixturenames", ())} & {*ASSERTIONS}]
    rate = session.config.getoption("specverify_false_fail_rate")
    session.config.stash[_SHARES] = dict.fromkeys(asserting, rate / max(1, len(asserting)))


def _worker(config: pytest.Config) -> str:
    return str(getattr(config, "workerinput", {}).get("workerid", ""))


def _known_failures(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"--specverify-xfails: {file} can't be read: {error}"
        raise pytest.UsageError(msg) from error
    known = {}
    for line in lines:
        name, _, reason = line.partition(" #") if not line.startswith("#") else ("", "", "")
        if name.strip():
            known[name.strip()] = reason.strip() or f"listed in {file.name}"
    return known


def _mark_known_failures(known: dict[str, str], items: list[pytest.Item]) -> set[str]:
    """The ids that no collected test has."""
    matched = set()
    for item in items:
        for name in (item.nodeid, item.nodeid.partition("[")[0]):
            if name in known:
                matched.add(name)
                item.add_marker(pytest.mark.xfail(reason=known[name]))
                break
    return known.keys() - matched


def _gone(unmatched: set[str], config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Those of no test: not what a session of chosen tests left out."""
    whole = not config.getoption("lf", default=False) and not any("::" in argument for argument in config.args)
    collected = {item.nodeid.partition("::")[0] for item in items} if whole else set()
    files = {name: name.partition("::")[0] for name in unmatched}
    return sorted(name for name, file in files.items() if file in collected or not (config.rootpath / file).exists())


def _warn_of(gone: list[str]) -> None:
    for name in gone:
        warning = pytest.PytestWarning(f"--specverify-xfails: no test has the id {name}")
        try:
            warnings.warn(warning, stacklevel=1)
        except pytest.PytestWarning as error:  # `-W error` asks for it
            raise pytest.UsageError(str(error)) from error


# ---------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def specverify_subject(pytestconfig: pytest.Config) -> Iterator[Subject]:
    """The pair of the options with the reference decoder, or the engine of `--specverify-engine`, and the prompts."""
    from specverify.pytest_assertion import in_one_sentence, subject_of_options  # noqa: PLC0415 - torch is imported here, not before

    with (
        in_one_sentence(),
        subject_of_options(
            target=pytestconfig.getoption("specverify_target"),
            draft=pytestconfig.getoption("specverify_draft"),
            engine=pytestconfig.getoption("specverify_engine"),
            options=tuple(pytestconfig.getoption("specverify_engine_option")),
            seed=seed_of(pytestconfig),
        ) as subject,
    ):
        yield subject


@pytest.fixture(scope="session")
def pair(specverify_subject: Subject) -> Pair:
    """Target and draft, loaded once a session."""
    assert specverify_subject.pair is not None
    return specverify_subject.pair


@pytest.fixture
def engine(request: pytest.FixtureRequest, specverify_subject: Subject) -> Engine:
    """What is under test; override it to hold an engine of your own against the pair."""
    lacking = _lacking(request.node, specverify_subject.engine)
    if lacking:
        pytest.skip(lacking)
    return specverify_subject.engine


@pytest.fixture
def assert_lossless(request: pytest.FixtureRequest, specverify_subject: Subject, engine: Engine) -> Assertion:
    """`assert_lossless()`: over prompts, tokens follow the target's own distribution; takes fields of the plan."""
    return _assertion(request, "assert_lossless", specverify_subject, engine)


@pytest.fixture
def assert_greedy_exact(request: pytest.FixtureRequest, specverify_subject: Subject, engine: Engine) -> Assertion:
    """`assert_greedy_exact()`: at temperature 0, speculation changes no token; takes fields of the plan."""
    return _assertion(request, "assert_greedy_exact", specverify_subject, engine)


def _assertion(request: pytest.FixtureRequest, name: str, subject: Subject, engine: Engine) -> Assertion:
    from specverify.pytest_assertion import Assertion, Ledger  # noqa: PLC0415 - as above

    item: pytest.Item = request.node
    if lacking := _lacking(item, engine):
        pytest.skip(lacking)
    shares = item.config.stash[_SHARES]
    if item.nodeid not in shares:
        msg = f"{item.nodeid}: name {name} as an argument of the test, so that its share of the error budget is known"
        raise pytest.UsageError(msg)
    marked: dict[str, Any] = {}
    for marker in reversed([*item.iter_markers("specverify_plan")]):  # the closest wins
        marked |= {key: value for key, value in marker.kwargs.items() if key != "reason"}
    ledger = item.stash.setdefault(_LEDGER, Ledger(shares[item.nodeid]))
    return Assertion(
        check_id=ASSERTIONS[name],
        subject=subject,
        engine=engine,
        seed=seed_of(item.config),
        plan=marked,
        ledger=ledger,
        record=lambda result: item.user_properties.append((PROPERTY, json.dumps(result))),
        reproduce=_reproduce(item),
    )


def _reproduce(item: pytest.Item) -> str:
    """This test alone, from where pytest was started: of the same models and engine, with its share of the error budget."""
    config = item.config
    within = item.nodeid.partition("::")[2]
    words = ["pytest", f"{os.path.relpath(item.path, config.invocation_params.dir)}::{within}"]
    for name in ("target", "draft", "engine"):
        if given := config.getoption(f"specverify_{name}"):
            words += [f"--specverify-{name}={given}"]
    for option in config.getoption("specverify_engine_option"):
        words += ["--specverify-engine-option", option]
    words += ["--specverify-seed", str(seed_of(config))]
    if (share := config.stash[_SHARES][item.nodeid]) != DEFAULT_RATE:
        words += ["--specverify-false-fail-rate", repr(share)]
    return shlex.join(words)


_LEDGER: pytest.StashKey[Any] = pytest.StashKey()


def _lacking(item: pytest.Item, engine: Engine) -> str:
    """Why a test is skipped: a capability that it needs, and the reason that it gives."""
    for marker in item.iter_markers("specverify_needs"):
        missing = [name for name in marker.args if name not in engine.capabilities]
        if missing:
            return f"the engine {engine.name} has no {', '.join(missing)}: {marker.kwargs['reason']}"
    return ""


# ---------------------------------------------------------------------------------------------- summary


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401 - pytest keeps its type private
    """Every assertion with what it could have seen, and how the error budget was spent; the same under xdist."""
    results = [
        (report.nodeid, json.loads(value))
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if not results:
        return
    rate = config.getoption("specverify_false_fail_rate")
    spent = sum(result["share"] for _, result in results)
    terminalreporter.section("specverify")
    for nodeid, result in sorted(results, key=lambda each: (each[1]["verdict"] == "PASS", each[0]))[:_MOST_LISTED]:
        terminalreporter.line(f"{result['verdict']:<13}{nodeid} {result['check']}: {result['seen']}")
    if len(results) > _MOST_LISTED:
        terminalreporter.line(f"and {len(results) - _MOST_LISTED} more")
    terminalreporter.line(
        f"error budget: {spent:.2g} of {rate:.2g} spent by {len(results)} assertion{'s' * (len(results) > 1)}, "
        f"seed {seed_of(config)}"
    )
