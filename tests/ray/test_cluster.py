"""A real Ray cluster of several processes on this machine: the same certificate, whoever dies."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from specverify.certify import certify
from specverify.cluster import sharded, without_clock
from specverify.codec import dump
from specverify.door import plan_of
from specverify.errors import UsageError
from tests.ray.lethal import healthy, lethal

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, about what it will change next year
]

ROOT = Path(__file__).parents[2]
CHECKS = ("compatibility", "greedy", "stopping", "reproducibility", "parameters", "lossless", "acceptance")
PLAN = plan_of(
    budget="quick", only=CHECKS, greedy_prompts=3, max_prompts=12, max_new_tokens=12, lossless_tokens=300,
    parameter_tokens=40, first_token_samples=60, first_token_prompts=2, batch_size=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _workers_import_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # `tox -e ray` has Ray itself in it


@pytest.fixture(scope="module")
def alone() -> str:
    """The certificate of one process, without its clock."""
    return dump(without_clock(certify(healthy(PLAN), PLAN)))


def on_cluster(make: partial[object], said: list[str], workers: int = 2) -> str:
    """The certificate of a cluster of this machine."""
    with sharded(healthy(PLAN), PLAN, make, address="local", num_workers=workers, say=said.append) as subject:
        return dump(without_clock(certify(subject, PLAN)))


def test_the_certificate_is_that_of_one_process(alone: str) -> None:
    """Bit for bit, apart from what a clock measured."""
    said: list[str] = []
    assert on_cluster(partial(healthy, PLAN), said) == alone
    assert not said


def test_a_worker_killed_in_the_middle_changes_nothing(alone: str, tmp_path: Path) -> None:
    """SIGKILL after a batch was decoded and before it was handed over: it is decoded again elsewhere."""
    said: list[str] = []
    grave = tmp_path / "grave"
    assert on_cluster(partial(lethal, PLAN, str(grave)), said) == alone
    assert grave.exists()
    assert said == ["a worker of the cluster died; what it was doing is done again elsewhere"]


def test_a_piece_that_kills_whoever_takes_it_ends_the_run(tmp_path: Path) -> None:
    """One sentence, not an endless row of workers."""
    with pytest.raises(UsageError, match=r"workers of the cluster die \(\d+ so far"):
        on_cluster(partial(lethal, PLAN, str(tmp_path / "g"), always=True), [])


def test_no_cluster_and_too_many_workers() -> None:
    """Both are said before anything is decoded."""
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:1 "):
        sharded(healthy(PLAN), PLAN, partial(healthy, PLAN), address="127.0.0.1:1", say=print).__enter__()
    with pytest.raises(UsageError, match="ask for at most"):
        sharded(healthy(PLAN), PLAN, partial(healthy, PLAN), address="local", num_workers=999, say=print).__enter__()
    assert os.environ["PYTHONPATH"]
