"""Hypothesis profiles, the defaults of every test run, and what can't run here, said aloud; imports nothing heavy."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent
pytest_plugins = ["pytester", "specverify.pytest_plugin"]  # ours is an entry point too, under the same name

# Before any test imports a library that reads them; a run never asks the network for a model.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
# Two threads on busy cores are slower than one, and sums in another order are other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The package up to the jobs needs none of these; a machine without them runs everything else.
_SURFACES = {
    "tests/plugin": ("typer", "rich", "pydantic", "jinja2", "matplotlib"),
    "tests/cli": ("typer", "rich", "pydantic", "jinja2", "matplotlib"),
    "tests/unit/report": ("rich", "jinja2", "matplotlib"),
    "tests/browser": ("jinja2", "matplotlib"),
    "tests/ray": ("ray", "typer", "rich", "pydantic"),
    "tests/tensor_parallel": ("accelerate", "typer", "rich", "pydantic"),
    **dict.fromkeys(
        (f"tests/unit/test_{name}.py" for name in ("codec", "statement", "matrix", "redaction", "policy_file", "door")),
        ("pydantic", "jinja2", "matplotlib", "typer"),
    ),
    "tests/unit/compare/test_difference.py": ("pydantic",),
    "tests/unit/golden/test_file.py": ("pydantic",),
    "tests/engines/test_http_engine.py": ("httpx2", "stamina"),
    "tests/engines/test_openai.py": ("httpx2", "stamina"),
}


def _missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a surface whose library isn't installed; the header says so."""
    inside = collection_path.is_relative_to(ROOT)
    needs = _SURFACES.get(collection_path.relative_to(ROOT).as_posix(), ()) if inside else ()
    return True if _missing(needs) else None


def pytest_report_header() -> list[str]:
    """What this run is, before its first test."""
    profile, threads = hypothesis.settings.get_current_profile_name(), os.environ["OMP_NUM_THREADS"]
    left_out = [(path, _missing(needs)) for path, needs in _SURFACES.items()]
    return [
        f"specverify: hypothesis profile {profile}, {threads} thread(s)",
        *(f"specverify: {path} is left out: {', '.join(names)} not installed" for path, names in left_out if names),
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need CUDA say so and are skipped where there is none."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs CUDA, and torch sees none")
        for item in wanting:
            item.add_marker(skip)
