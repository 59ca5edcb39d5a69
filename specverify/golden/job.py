"""The jobs: record a pair's golden, add to one, and hold a pair against it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.certify import environment
from specverify.golden.attribution import attribute
from specverify.golden.capture import again, capture
from specverify.golden.records import Golden, GoldenReport, Provenance, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.engines import Engine
    from specverify.models.loading import Pair
    from specverify.records import Prompt
    from specverify.watch import Watch

__all__ = ["STAGES", "check", "extended", "missing_and_unused", "provenance", "record"]

STAGES = 4
"""Units of progress of a recording or a check."""

SEED = 17
NUM_SPECULATIVE_TOKENS = 3
MAX_NEW_TOKENS = 32


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    name: str,
    provenance: Provenance,
    max_new_tokens: int = MAX_NEW_TOKENS,
    engine: Engine | None = None,
    watch: Watch | None = None,
) -> Recording:
    """A new golden of `pair`."""
    with _one_thread(pair):
        return capture(
            pair,
            prompts,
            name=name,
            provenance=provenance,
            seed=SEED,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            max_new_tokens=max_new_tokens,
            engine=engine,
            watch=watch,
        )


def check(
    pair: Pair,
    old: Recording,
    prompts: Sequence[Prompt] | None = None,
    *,
    provenance: Provenance,
    engine: Engine | None = None,
    watch: Watch | None = None,
) -> GoldenReport:
    """Hold `pair` against a golden. `prompts` are those asked for today; None asks for the recorded ones."""
    started = time.perf_counter()
    with _one_thread(pair):
        new = again(pair, old, provenance=provenance, engine=engine, watch=watch)
    missing, unused = missing_and_unused(old.golden, prompts)
    report = attribute(old, new, missing=missing, unused=unused)
    return dataclasses.replace(report, elapsed_s=time.perf_counter() - started)


def missing_and_unused(golden: Golden, prompts: Sequence[Prompt] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Prompts without a golden, and goldens without a prompt; one whose text changed is both."""
    if prompts is None:
        return (), ()
    recorded = [each.prompt for each in golden.prompts]
    return (
        tuple(prompt.id for prompt in prompts if prompt not in recorded),
        tuple(prompt.id for prompt in recorded if prompt not in prompts),
    )


def extended(old: Recording, more: Recording) -> Recording:
    """A golden with more prompts, each with the provenance of its own recording."""
    number = len(old.golden.provenances)
    added = tuple(dataclasses.replace(each, recording=number) for each in more.golden.prompts)
    golden = dataclasses.replace(
        old.golden,
        prompts=old.golden.prompts + added,
        provenances=old.golden.provenances + more.golden.provenances,
    )
    arrays = {
        name: np.concatenate((value, more.arrays[name])) if name.startswith("laws.") else value
        for name, value in old.arrays.items()
    }
    return Recording(golden=golden, arrays=arrays)


def provenance(device: torch.device, dtype: str, *, command: str, reason: str) -> Provenance:
    """Who records, with what, and why."""
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        git_commit=_git_commit(),
        reason=reason,
        environment=environment(device, dtype),
    )


def _git_commit() -> str:
    """Of the working folder, with `+` where it has changes; empty where there is no repository."""
    git = shutil.which("git")
    if git is None:
        return ""

    def says(*words: str) -> str:
        done = subprocess.run([git, *words], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed words
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return says("rev-parse", "HEAD") + ("+" if says("status", "--porcelain", "--untracked-files=no") else "")
    return ""


@contextlib.contextmanager
def _one_thread(pair: Pair) -> Iterator[None]:
    """On a CPU, sums in another order are other bits, so goldens are made and checked with one thread."""
    threads = torch.get_num_threads()
    if pair.target.model.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
