"""The suites by name, and one run of some of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from specverify.bench.decoding import assisted_suite, batch_suite, certification_suite, overhead_of, prompt_suite
from specverify.bench.report import BenchReport
from specverify.bench.sampler import SAMPLER_SIZES, sampler_suite
from specverify.bench.verification import Workload, verification_suite
from specverify.certify import environment, run_check
from specverify.checks.acceptance import acceptance
from specverify.checks.cost import cost
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.bench.report import Comparison
    from specverify.plan import Plan
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["SUITES", "Sizes", "bench"]

SUITES = ("verification", "sampler", "certification", "pair", "assisted", "batch", "prompt")
"""Verification steps; texts from tables; samples of small random models; passes, acceptance and speed-up of the pair; against transformers; by batch; by prompt length."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the suites go over."""

    vocab_sizes: tuple[int, ...] = (50_257, 128_256)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 8, 64)
    num_speculative_tokens: tuple[int, ...] = (5,)
    prompt_lengths: tuple[int, ...] = (16, 64, 192)
    repeats: int = 7
    cpu_time: bool = False
    """Count the time of this process alone; the `pair` suite keeps to the wall's."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds."""
        return time.process_time if self.cpu_time else time.perf_counter


def bench(
    suites: Sequence[str],
    sizes: Sizes,
    *,
    subject: Callable[[], Subject],
    plan: Plan,
    device: torch.device,
    command: str,
    watch: Watch | None = None,
) -> BenchReport:
    """Run the suites. `subject` is asked for where one of them needs a pair."""
    watch = Silent() if watch is None else watch
    created, load = datetime.now(UTC).isoformat(timespec="seconds"), _load_per_core()
    found: list[Comparison] = []
    left_out: list[str] = []
    measurements: dict[str, float | int | str] = {}
    if "verification" in suites:
        works = _workloads(sizes, device)
        watch.stage("verification", len(works))
        for work in works:
            comparisons, missing = verification_suite(work, repeats=sizes.repeats, clock=sizes.clock)
            found += comparisons
            left_out += missing
            watch.advance()
    if "certification" in suites:
        watch.stage("certification", 1)
        found += certification_suite(repeats=sizes.repeats, clock=sizes.clock)
        watch.advance()
    if "sampler" in suites:
        watch.stage("sampler", len(SAMPLER_SIZES))
        for vocab_size, tokens in SAMPLER_SIZES:
            found += sampler_suite(vocab_size, tokens, repeats=sizes.repeats, clock=sizes.clock)
            watch.advance()
    if set(suites) - {"verification", "sampler", "certification"}:
        of_pair, measurements = _with_pair(suites, sizes, subject(), plan, watch)
        found += of_pair
    watch.close()
    return BenchReport(
        created=created,
        command=command,
        environment=environment(device, plan.dtype),
        load_per_core=load,
        clock="cpu" if sizes.cpu_time else "wall",
        comparisons=tuple(found),
        measurements=measurements,
        not_run=tuple(dict.fromkeys(left_out)),
    )


def _workloads(sizes: Sizes, device: torch.device) -> list[Workload]:
    """Small batches of large vocabularies on the CPU, where a batch is a loop."""
    return [
        Workload(
            vocab_size=vocab_size,
            num_speculative_tokens=drafts,
            batch=batch,
            dtype=getattr(torch, dtype),
            device=device.type,
        )
        for vocab_size in sizes.vocab_sizes
        for drafts in sizes.num_speculative_tokens
        for batch in sizes.batches
        for dtype in sizes.dtypes
        if device.type != "cpu" or batch <= 8
    ]


def _with_pair(
    suites: Sequence[str], sizes: Sizes, subject: Subject, plan: Plan, watch: Watch
) -> tuple[list[Comparison], dict[str, float | int | str]]:
    decoder, repeats = subject.decoder, sizes.repeats
    assert decoder is not None  # `make_subject` builds one
    found: list[Comparison] = []
    measurements: dict[str, float | int | str] = {}
    if "pair" in suites:
        for check in (acceptance, cost):
            result = run_check(check, subject, plan, watch=watch)
            measurements |= {f"{check.id}/{name}": value for name, value in result.measurements.items()}
    if "assisted" in suites:
        watch.stage("assisted", 2)
        for temperature in (0.0, 1.0):
            found += assisted_suite(subject, temperature=temperature, repeats=repeats, clock=sizes.clock)
            watch.advance()
        measurements |= overhead_of(subject, repeats=repeats, clock=sizes.clock)
    prompt = subject.prompts[0].token_ids
    if "batch" in suites:
        watch.stage("batch", len(sizes.batches))
        for batch in sizes.batches:
            found += batch_suite(decoder, prompt, batch=batch, repeats=repeats, clock=sizes.clock)
            watch.advance()
    if "prompt" in suites:
        watch.stage("prompt", len(sizes.prompt_lengths))
        for length in sizes.prompt_lengths:
            found += prompt_suite(decoder, prompt, length=length, repeats=repeats, clock=sizes.clock)
            watch.advance()
    return found, measurements


def _load_per_core() -> float:
    """NaN where the system doesn't tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return float("nan")
