"""The fixture `golden` in somebody else's suite: new goldens, changed pairs, unused ones, and xdist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specverify
from tests.unit.golden.upgrades import UPGRADES, copy_of, tiny_pair

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_pair(golden, number):
    golden("tiny", target="pair/target", draft="pair/draft", prompts="prompts.jsonl")
"""
OPTIONS = ("-p", "specverify.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subprocesses import what this process imports."""
    monkeypatch.setenv("PYTHONPATH", str(Path(specverify.__file__).parents[1]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("plugin") / "pair")


@pytest.fixture
def suite(pytester: pytest.Pytester, pair: Path) -> pytest.Pytester:
    """A project with a pair and one test."""
    copy_of(pair, pytester.path / "pair")
    lines = [{"id": name, "text": text} for name, text in (("a", "Elizabeth did not"), ("b", "def f(x):"))]
    (pytester.path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    pytester.makepyfile(SUITE.format(tests=1))
    return pytester


def test_new_goldens_are_written_only_when_asked(suite: pytest.Pytester) -> None:
    """Without the option a missing golden fails with the command; with it the golden is recorded, then held."""
    missing = suite.runpytest(*OPTIONS)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no golden in *specverify golden record*--reason*"])
    assert "another exception" not in missing.stdout.str()
    assert not (suite.path / "golden").exists()
    suite.runpytest(*OPTIONS, "--specverify-golden-update-new").assert_outcomes(passed=1)
    assert (suite.path / "golden" / "tiny" / "golden.json").is_file()
    suite.runpytest(*OPTIONS).assert_outcomes(passed=1)


def test_a_change_fails_with_its_layer_and_is_not_recorded_over(suite: pytest.Pytester) -> None:
    """The option writes what is new, never what changed."""
    suite.runpytest(*OPTIONS, "--specverify-golden-update-new").assert_outcomes(passed=1)
    before = (suite.path / "golden" / "tiny" / "golden.json").read_bytes()
    next(each for each in UPGRADES if each.name == "changed default top_k").apply(suite.path / "pair")
    changed = suite.runpytest(*OPTIONS, "--specverify-golden-update-new")
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*the sampling changed first*", "*if that was meant, record again: * --update*"])
    assert (suite.path / "golden" / "tiny" / "golden.json").read_bytes() == before


def test_recording_is_no_remedy_for_a_mistake(suite: pytest.Pytester) -> None:
    """A prompt file that is gone is said in one sentence, without the option for new goldens."""
    suite.runpytest(*OPTIONS, "--specverify-golden-update-new").assert_outcomes(passed=1)
    (suite.path / "prompts.jsonl").unlink()
    gone = suite.runpytest(*OPTIONS)
    gone.stdout.fnmatch_lines(["can't read the prompt file prompts.jsonl: no such file or directory"])
    assert "update-new" not in gone.stdout.str()


def test_unused_goldens_fail_a_whole_session_and_no_chosen_one(suite: pytest.Pytester) -> None:
    """A golden that no test asks for says so at the end."""
    suite.runpytest(*OPTIONS, "--specverify-golden-update-new").assert_outcomes(passed=1)
    (suite.path / "golden" / "forgotten").mkdir()
    (suite.path / "golden" / "forgotten" / "golden.json").write_text("{}", encoding="utf-8")
    whole = suite.runpytest(*OPTIONS)
    assert whole.ret == pytest.ExitCode.TESTS_FAILED
    whole.stdout.fnmatch_lines(["unused: forgotten in *"])
    assert suite.runpytest(*OPTIONS, "-k", "pair").ret == pytest.ExitCode.OK


def test_a_session_without_the_fixture_is_left_alone(pytester: pytest.Pytester) -> None:
    """The plugin is nobody's business there."""
    (pytester.path / "golden" / "one").mkdir(parents=True)
    (pytester.path / "golden" / "one" / "golden.json").write_text("{}", encoding="utf-8")
    pytester.makepyfile("def test_nothing():\n    pass\n")
    assert pytester.runpytest(*OPTIONS).ret == pytest.ExitCode.OK


def test_nothing_heavy_is_imported_before_the_fixture_is_used(pytester: pytest.Pytester) -> None:
    """Collection of a suite costs neither torch nor transformers."""
    pytester.makepyfile(
        "import sys\ndef test_light(golden):\n    assert not {'torch', 'transformers', 'typer'} & set(sys.modules)\n"
    )
    pytester.runpytest_subprocess(*OPTIONS).assert_outcomes(passed=1)


LIGHT = """
import specverify.pytest_golden as plugin

plugin.GoldenChecker.__call__ = lambda self, name: self.config.stash[plugin._SESSION].used.add(name)
"""


@pytest.mark.parametrize(("used", "code"), [(("a", "b"), 0), (("a", "a"), 1)])
def test_workers_tell_the_controller_what_they_used(
    pytester: pytest.Pytester, used: tuple[str, str], code: int
) -> None:
    """Each worker sees one test; the controller knows of both."""
    pytest.importorskip("xdist")
    for name in ("a", "b"):
        (pytester.path / "golden" / name).mkdir(parents=True)
        (pytester.path / "golden" / name / "golden.json").write_text("{}", encoding="utf-8")
    pytester.makeconftest(LIGHT)
    pytester.makepyfile("\n".join(f"def test_{n}(golden):\n    golden({name!r})" for n, name in enumerate(used)))
    result = pytester.runpytest_subprocess(*OPTIONS, "-n", "2")
    result.assert_outcomes(passed=2)
    assert result.ret == code


@pytest.mark.nightly
def test_workers_record_once_and_share_what_they_used(suite: pytest.Pytester) -> None:
    """Under xdist two workers want the same new golden, and the controller knows that it was used."""
    pytest.importorskip("xdist")
    suite.makepyfile(SUITE.format(tests=2))
    (suite.path / "golden" / "forgotten").mkdir(parents=True)
    (suite.path / "golden" / "forgotten" / "golden.json").write_text("{}", encoding="utf-8")
    result = suite.runpytest_subprocess(*OPTIONS, "-n", "2", "--specverify-golden-update-new")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["unused: forgotten in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
