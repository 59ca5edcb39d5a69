"""The repository under test: what its documents, scripts and settings promise each other.

Most of this reads files as git sees them, so it is left out where there is no checkout (an unpacked archive).
"""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MAIN_JOB = "pip install -c constraints.txt . && specverify certify"
TEST_COMMAND = "pip install tox && tox"
MAX_LINES = 400
FRAGMENT = re.compile(r"(\d+|\+\w+)\.(feature|bugfix|doc|removal|misc)(\.\d+)?\.md")
KEY = re.compile(r"[A-Z][A-Za-z]+(?:19|20)\d\d")
CITATION = re.compile(rf"\[({KEY.pattern}\b[^\]\n]*)\]")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every text file that is, or could be, committed."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    texts = {}
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts[name] = content.decode(errors="replace")
    assert texts
    return texts


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """`pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    """The pinned release of each package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line.strip() and not line.startswith("#")]
    assert all(equals for _, equals, _ in pins), "constraints.txt pins with == alone"
    return {canonicalize_name(name): release.strip() for name, _, release in pins}


def code_of(texts: dict[str, str]) -> dict[str, str]:
    """Our modules and tests."""
    return {name: text for name, text in texts.items() if name.endswith(".py")}


def prose_of(texts: dict[str, str]) -> dict[str, str]:
    """What people read: documents and docstrings."""
    return {name: text for name, text in texts.items() if name.endswith((".py", ".md", ".jinja"))}


def places(pattern: str, texts: dict[str, str]) -> list[str]:
    """`file:line: text` of each match."""
    found = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if found.search(line)
    ]


# ---------------------------------------------------------------------------------------------------- README and CI
@pytest.mark.parametrize("command", [MAIN_JOB, TEST_COMMAND])
def test_readme_states_the_two_commands(command: str) -> None:
    """Each stands in a code block, on a line of its own (a comment may follow)."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert command in [line.partition("#")[0].strip() for line in lines]


def test_ci_runs_the_readmes_test_command_and_nothing_else() -> None:
    """`.ci/run` goes to the repository and calls that command; which python is the only thing that it may add."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in script if line.strip() and not line.startswith(("#", "set ", "cd "))]
    assert [re.sub(r"python3? -m ", "", line) for line in commands] == [TEST_COMMAND]


def test_workflow_calls_the_ci_script() -> None:
    """What the hosted CI does is what `.ci/run` does."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"run: (bash )?(\./)?\.ci/run$", workflow, re.MULTILINE)


def test_plain_tox_runs_every_environment_that_contributing_names() -> None:
    """All but those that no pull request can wait for, or whose packages are large."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    listed = set(re.split(r"[,\s]+", tox["tox"]["env_list"].strip()))
    assert listed == {"lint", "types", "floors", "py311", "oldest", "properties", "bench", "triton", "llamacpp", "gpu"}
    named = set(re.findall(r"`tox -e (\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert named == listed | {
        "mlx",
        "mutants",
        "nightly",
        "onnxruntime",
        "openvino",
        "ray",
        "smollm2",
        "torchrun",
        "vllm",
    }


def test_every_environment_that_a_document_names_exists(texts: dict[str, str]) -> None:
    """`tox -e NAME` in prose, a docstring or a configuration file can be typed as it stands."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    sections = [name.removeprefix("testenv:") for name in tox.sections() if name.startswith("testenv:")]
    known = {name for section in sections for name in _expanded(section)}
    named = {name for text in texts.values() for name in re.findall(r"tox -e ([a-z][\w-]*)", text)}
    assert named <= known
    assert {"ray", "golden-real"} <= named


def _expanded(section: str) -> list[str]:
    """`a-{b,c}` is a-b and a-c."""
    parts = [part.split(",") for part in re.split(r"[{}]", section)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


# -------------------------------------------------------------------------------------------------- what files contain
def test_no_file_names_a_registry_host(texts: dict[str, str]) -> None:
    """Where packages and models come from is the user's configuration."""
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "registry.npmjs" + ".org"]
    assert not places("|".join(map(re.escape, [*hosts, "--index" + "-url", "--extra-index" + "-url"])), texts)


def test_no_file_names_a_path_of_one_machine(texts: dict[str, str]) -> None:
    """A home, a workspace, a wheel cache: each is somebody's."""
    assert not places(r"(?<![\w.}\])~-])/(work|root|home/\w+|Users/\w+|opt/\w+)/", texts)


def test_no_document_installs_another_package(texts: dict[str, str]) -> None:
    """The distribution is `specverify-decoding`; `specverify` alone on a registry would be someone else's."""
    assert not places(r"pip install (-\S+ )*specverify(?!-decoding)\b", texts)


def test_modules_are_short(texts: dict[str, str]) -> None:
    """No module is over 400 lines."""
    lengths = {name: text.count("\n") for name, text in code_of(texts).items()}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_each_paper_key_resolves(texts: dict[str, str]) -> None:
    """A key in brackets has one entry in the bibliography."""
    entries = Counter(re.findall(rf"^- \*\*\[({KEY.pattern})\]\*\*", texts["docs/bibliography.md"], re.MULTILINE))
    assert {key for key, count in entries.items() if count > 1} == set()
    dangling = {
        f"{name}: {key}"
        for name, text in prose_of(texts).items()
        if name != "tests/test_repository.py"
        for citation in CITATION.findall(text)
        for key in KEY.findall(citation)
        if key not in entries and key != "Key2023"  # CONTRIBUTING's placeholder
    }
    assert not dangling


def test_each_note_is_written_once(texts: dict[str, str]) -> None:
    """`Note [Name]` is text in one file, and elsewhere a reference to it."""
    defined, referred = Counter[str](), set[str]()
    for name, text in texts.items():
        if name.startswith(("specverify/", "tests/unit/", "tests/meta/", "properties/")) or name == "tox.ini":
            for note, colon in re.findall(r"Note \[([^\]]+)\](:?)", text):
                defined.update([note] if colon else [])
                referred.add(note)
    assert referred - set(defined) == set()
    assert {note for note, count in defined.items() if count > 1} == set()


# ------------------------------------------------------------------------------------------------------------- ignores
def test_each_ignored_rule_has_its_reason() -> None:
    """A rule that is off for everyone, or for a folder, says why beside it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^\[tool\.ruff\.lint\]\n.*?(?=^\[tool\.(?!ruff))", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    rules = re.findall(r"^\s*\"[A-Z]+\d*\",?(.*)$", section.group(), re.MULTILINE)
    assert rules
    assert [rule for rule in rules if not re.match(r"\s*# \w+", rule)] == []


def test_each_changelog_fragment_is_of_a_kind_that_towncrier_reads(texts: dict[str, str]) -> None:
    """It passes over any other without a word."""
    names = [Path(path).name for path in texts if path.startswith("changelog.d/") and path.endswith(".md")]
    assert [name for name in names if not FRAGMENT.fullmatch(name)] == []
    assert not FRAGMENT.fullmatch("8.fix.md")
    assert len(names) > 50


def test_each_suppression_in_code_has_its_reason(texts: dict[str, str]) -> None:
    """`noqa: RULE - reason` and `type: ignore[code]  # reason`."""
    code = {name: text for name, text in code_of(texts).items() if name != "tests/test_repository.py"}
    assert not places(r"# noqa(?!: [A-Z]+\d+(, [A-Z]+\d+)* - \w)", code)
    assert not places(r"# type: ignore(?!\[[a-z, -]+\]  # \w)", code)


# ---------------------------------------------------------------------------------------------------- what is installed
@pytest.mark.parametrize(
    "module", ["specverify", "specverify.records", "specverify.plan", "specverify.pairs", "specverify.cli"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(module: str) -> None:
    """`specverify --help`, and a plugin that only names a fixture, start at once."""
    if module == "specverify.cli":
        pytest.importorskip("typer", reason="a surface, and its library isn't installed")
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "matplotlib", "scipy"} & set(json.loads(ran.stdout))


def test_console_script_exists(project: dict[str, Any]) -> None:
    """`specverify` calls a function that is there."""
    pytest.importorskip("typer", reason="a surface, and its library isn't installed")
    module, _, name = project["project"]["scripts"]["specverify"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_constraints_pin_every_direct_dependency_inside_its_range(
    project: dict[str, Any], constraints: dict[str, str]
) -> None:
    """So `pip install -c constraints.txt .` and tox install known-good releases, whatever was published since."""
    groups = project["dependency-groups"].values()
    needed = [*project["project"]["dependencies"], *(need for group in groups for need in group)]
    for need in map(Requirement, needed):
        release = constraints.get(canonicalize_name(need.name))
        assert release is not None, f"{need.name} is not pinned"
        assert need.specifier.contains(release), f"{need} does not admit {release}"


def test_torch_is_pinned_without_a_build(constraints: dict[str, str]) -> None:
    """The same pin takes the CPU build on one machine and the CUDA build on another."""
    assert "+" not in constraints["torch"]


def test_wheel_carries_weights_templates_and_types() -> None:
    """What the installed package reads at run time is in it; tox installs the wheel, so there it is looked at."""
    try:
        files = importlib.metadata.files("specverify-decoding") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the checkout; nothing is installed")
    names = {path.as_posix() for path in files}
    if "specverify/__init__.py" not in names:
        pytest.skip("installed as editable")
    paths = [path.relative_to(ROOT) for path in (ROOT / "specverify").rglob("*") if path.is_file()]
    data = {path.as_posix() for path in paths if path.suffix not in {".py", ".pyc"} and "/." not in path.as_posix()}
    assert data - names == set()
    assert "specverify/py.typed" in names
