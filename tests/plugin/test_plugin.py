"""The pytest plugin as a user's test suite sees it, run by pytester on small plans."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from specverify.pairs import embedded
from specverify.pytest_assertion import subject_of_options

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "specverify.pytest_plugin", "-p", "no:cacheprovider")
SMALL = "reason='small', greedy_prompts=2, max_new_tokens=8, max_prompts=4"

GREEDY = f"""
import pytest

@pytest.mark.specverify_plan({SMALL})
def test_greedy(assert_greedy_exact):
    assert_greedy_exact()
"""

BROKEN = f"""
import pytest
from specverify.faults import find_fault

@pytest.fixture
def engine(specverify_subject):
    return find_fault("cache-one-long").plant(specverify_subject).engine

@pytest.mark.specverify_plan({SMALL})
def test_greedy(assert_greedy_exact):
    assert_greedy_exact(max_new_tokens=24)
"""


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    """What pytester's sessions import lazily is imported before them: torch can't be imported twice in a process."""
    with subject_of_options(target=None, draft=None, engine="reference", seed=1):
        pass


@pytest.fixture(autouse=True)
def _from_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def test_a_healthy_pair_passes_and_the_summary_says_what_was_spent(pytester: pytest.Pytester) -> None:
    """Header first; then one line an assertion, and the budget."""
    pytester.makepyfile(GREEDY)
    result = pytester.runpytest_inprocess(*PLUGIN, "--specverify-seed", "5")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([
        "specverify *: the embedded pair, engine reference, torch *, transformers *",
        "specverify: seed 5, false alarms at most 1e-06 a session; 5,000 tokens show a shift of the mean law from 0.*",
        "PASS * greedy: * tokens, smallest detectable *",
        "error budget: 5e-07 of 1e-06 spent by 1 assertion, seed 5",
    ])  # fmt: skip


def test_a_fault_fails_with_the_numbers_and_how_to_see_it_again(pytester: pytest.Pytester) -> None:
    """The engine fixture is the user's to override; the failure is an AssertionError of ours."""
    pytester.makepyfile(BROKEN)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*ClaimViolated: greedy FAIL: *", "*Reproduce: pytest test_*.py::test_greedy --specverify-seed 17"]
    )
    result.stdout.fnmatch_lines(["FAIL * greedy: *"])


def test_the_command_that_it_names_asks_the_same_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder where pytest was started, of the models that were given, with that test's share of the budget."""
    pair = embedded()
    pytester.makepyfile(BROKEN + "\n\ndef test_other(assert_lossless): pass\n")
    monkeypatch.chdir(pytester.mkdir("below it"))
    file = next(pytester.path.glob("test_*.py"))
    models = (f"--specverify-target={pair.target}", f"--specverify-draft={pair.draft}")
    result = pytester.runpytest_inprocess(*PLUGIN, f"../{file.name}", *models, "--specverify-seed", "3")
    said = next(line for line in result.outlines if "Reproduce: " in line).partition("Reproduce: ")[2]
    _, first, *others = shlex.split(said)
    assert first == f"../{file.name}::test_greedy"
    assert others == [*models, "--specverify-seed", "3", "--specverify-false-fail-rate", repr(5e-7)]
    again = pytester.runpytest_inprocess(*PLUGIN, first, *others)
    again.assert_outcomes(failed=1)
    assert [line for line in again.outlines if "ClaimViolated" in line] == [
        line for line in result.outlines if "ClaimViolated" in line
    ]


def test_too_little_evidence_is_no_pass(pytester: pytest.Pytester) -> None:
    """An underpowered assertion fails, and says how many tokens it wants."""
    pytester.makepyfile("""
        def test_law(assert_lossless):
            assert_lossless(lossless_tokens=30, max_new_tokens=8, max_prompts=4, first_token_prompts=1, first_token_samples=20)
        """)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ClaimViolated: lossless INCONCLUSIVE: too few tokens: *"])


def test_lossless_passes_on_a_pair_and_fails_on_a_leak(pytester: pytest.Pytester) -> None:
    """Two assertions in one test spend a half and a quarter of its share."""
    pytester.makepyfile("""
        import pytest
        from specverify.faults import find_fault

        SMALL = dict(lossless_tokens=400, max_new_tokens=16, max_prompts=8, first_token_prompts=1,
                     first_token_samples=50, largest_undetected_shift=0.5)

        def test_law(assert_lossless, specverify_subject):
            assert_lossless(**SMALL)
            broken = find_fault("always-accept").plant(specverify_subject).engine
            with pytest.raises(AssertionError, match="lossless FAIL"):
                assert_lossless(broken, **SMALL)
        """)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["error budget: 7.5e-07 of 1e-06 spent by 2 assertions*"])


def test_nothing_heavy_is_imported_until_a_fixture_is_used(pytester: pytest.Pytester) -> None:
    """A suite that has the plugin and doesn't use it pays nothing."""
    pytester.makepyfile(
        "import sys\n\ndef test_light():\n    assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}\n"
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)


def test_shares_add_up_to_the_rate(pytester: pytest.Pytester) -> None:
    """Each test that names an assertion has an even part, whatever else runs."""
    pytester.makepyfile("""
        from specverify.pytest_plugin import _SHARES

        def test_a(request, assert_greedy_exact): pass
        def test_b(assert_lossless, assert_greedy_exact): pass
        def test_c(request):
            shares = request.config.stash[_SHARES]
            assert len(shares) == 2 and sum(shares.values()) == 0.01
        """)
    pytester.runpytest_inprocess(
        *PLUGIN, "--specverify-false-fail-rate", "0.01", "-k", "test_c or test_a or test_b"
    ).assert_outcomes(passed=3)


def test_results_and_seed_travel_under_xdist(pytester: pytest.Pytester) -> None:
    """Workers use the seed that the controller drew, and their results reach its summary."""
    pytest.importorskip("xdist")
    pytester.makepyfile("""
        import json

        def test_one(request, record_property):
            seed = request.config.getoption("specverify_seed")
            record_property("specverify", json.dumps({"check": "greedy", "verdict": "PASS", "share": 1e-7, "seen": str(seed)}))

        test_two = test_one
        """)
    result = pytester.runpytest_subprocess(*PLUGIN, "-n", "2", "--specverify-vary-seed")
    result.assert_outcomes(passed=2)
    header = next(line for line in result.outlines if line.startswith("specverify: seed"))
    seed = header.split("seed ")[1].split(",")[0]
    result.stdout.fnmatch_lines(
        [f"PASS * greedy: {seed}", f"error budget: 2e-07 of 1e-06 spent by 2 assertions, seed {seed}"]
    )


def test_known_failures_are_marked_and_unmatched_ids_warned_of(pytester: pytest.Pytester) -> None:
    """With the reason that stands behind the id; a parametrised test is matched by its bare id too."""
    pytester.makepyfile(
        test_mine="""
        import pytest
        def test_a(): assert False
        @pytest.mark.parametrize("x", [1, 2])
        def test_b(x): assert False
        """
    )
    pytester.makefile(
        ".txt", known="# ours\ntest_mine.py::test_a  # issue 7\ntest_mine.py::test_b\ntest_mine.py::test_gone # old\n"
    )
    given = (*PLUGIN, "--specverify-xfails", "known.txt", "-rx", "-W")
    result = pytester.runpytest_inprocess(*given, "always::pytest.PytestWarning")
    result.assert_outcomes(xfailed=3, warnings=1)
    result.stdout.fnmatch_lines(
        ["*no test has the id test_mine.py::test_gone*", "XFAIL test_mine.py::test_a - issue 7*"]
    )


def test_known_failures_that_were_not_chosen_are_no_mistake(pytester: pytest.Pytester) -> None:
    """What a run of some tests leaves out is there all the same; an id whose file is gone never is."""
    pytester.makepyfile(test_mine="def test_a(): pass\ndef test_b(): pass\n", test_other="def test_c(): pass\n")
    pytester.makefile(".txt", known="test_mine.py::test_b\ntest_other.py::test_c\ntest_gone.py::test_d\n")
    given = (*PLUGIN, "--specverify-xfails", "known.txt", "-W", "always::pytest.PytestWarning")
    result = pytester.runpytest_inprocess(*given, "test_mine.py::test_a")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*no test has the id test_gone.py::test_d"])


def test_a_mistake_in_a_test_shows_its_line_and_one_sentence(pytester: pytest.Pytester) -> None:
    """Nothing of what lies between, be it a field, an engine's name, or an option that only the fixture can judge."""
    pytester.makepyfile("""
        def test_field(assert_lossless):
            assert_lossless(losless_tokens=7)

        def test_engine(assert_greedy_exact):
            assert_greedy_exact("transformers")
        """)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.stdout.fnmatch_lines([
        "E *PlanError: the plan has no field 'losless_tokens'; did you mean 'lossless_tokens'?",
        "E *PlanError: engine='transformers' is no engine (it lacks decode, *",
    ])  # fmt: skip
    assert "codec.py" not in result.stdout.str()
    result = pytester.runpytest_inprocess(*PLUGIN, "--specverify-engine", "refernce")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["there is no engine named 'refernce'; did you mean 'reference'?"])
    assert "registry.py" not in result.stdout.str()


def test_markers_give_their_reasons(pytester: pytest.Pytester) -> None:
    """What an engine can't be asked is skipped with the reason; a marker without one is refused."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.specverify_needs("counters", reason="the dashboard is compared")
        def test_counters(engine): pass
        """)
    result = pytester.runpytest_inprocess(*PLUGIN, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*reference has no counters: the dashboard is compared"])
    pytester.makepyfile("import pytest\n\n@pytest.mark.specverify_needs('steps')\ndef test_x(): pass\n")
    result = pytester.runpytest_inprocess(*PLUGIN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*specverify_needs needs reason='*'"])
    pytester.makepyfile("import pytest\n\n@pytest.mark.specverify_needs('step', reason='x')\ndef test_x(): pass\n")
    result = pytester.runpytest_inprocess(*PLUGIN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*test_x: the marker specverify_needs names no capability 'step'; did you mean 'steps'[?]"]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--specverify-false-fail-rate", "2"), "must lie between 0 and 1"),
        (("--specverify-seed", "1", "--specverify-vary-seed"), "exclude each other"),
        (("--specverify-seed", "-1"), "must be at least 0"),
        (("--specverify-draft", "mine"), "--specverify-draft has no target"),
        (("--specverify-engine-option", "a=1"), "say which with --specverify-engine"),
        (("--specverify-xfails", "nowhere.txt"), "nowhere.txt can't be read"),
    ],
)
def test_mistaken_options(pytester: pytest.Pytester, arguments: tuple[str, ...], said: str) -> None:
    """One sentence, and pytest's own exit code for usage."""
    pytester.makepyfile("def test_x(): pass\n")
    result = pytester.runpytest_inprocess(*PLUGIN, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join((*result.outlines, *result.errlines))


def test_a_path_that_would_lead_pytest_astray(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """After a blank it would be where pytest looks for its configuration: the suite's own would be passed over."""
    pytester.makeini("[pytest]\nmarkers = mine\n")
    pytester.makepyfile("def test_x(pytestconfig):\n    assert pytestconfig.inipath\n")
    (elsewhere := tmp_path.parent / f"{tmp_path.name}-models").mkdir()
    result = pytester.runpytest_subprocess(*PLUGIN, "--specverify-target", str(elsewhere))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*write --specverify-target={elsewhere}: *"])
    pytester.runpytest_subprocess(*PLUGIN, f"--specverify-target={elsewhere}").assert_outcomes(passed=1)


def test_an_engine_of_the_users_own_by_its_name(pytester: pytest.Pytester) -> None:
    """`--specverify-engine module:callable` is given the settings, and its answer is held against the target."""
    pytester.makepyfile(
        mine="""
        from dataclasses import replace

        class Wrong:
            name, capabilities = "wrong", frozenset({"speculation_switch", "steps", "seed"})
            parameters = frozenset({"temperature"})
            def decode(self, requests):
                raise OSError("it hung up")

        def opened(settings):
            assert (settings.target / "config.json").is_file()
            return Wrong()
        """
    )
    pytester.makepyfile(GREEDY)
    result = pytester.runpytest_inprocess(*PLUGIN, "--specverify-engine", "mine:opened")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the engine broke: wrong raised OSError*it hung up*"])
