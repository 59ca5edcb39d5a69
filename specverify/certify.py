"""The job: may this pair go out? A plan of checks, each asked, scored, concluded; then judged together.

Flow, one way: rounds of requests → engine → traces → scorer → scored traces → check → judge → certificate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
import time
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from specverify import __version__
from specverify.checks.acceptance import acceptance
from specverify.checks.boundary import boundary
from specverify.checks.check import Unscored, not_honoured, reproduce
from specverify.checks.compatibility import compatibility
from specverify.checks.cost import cost
from specverify.checks.exactness import exactness
from specverify.checks.greedy import greedy
from specverify.checks.lossless import lossless
from specverify.checks.parameters import parameters
from specverify.checks.reproducibility import reproducibility
from specverify.checks.stopping import stopping
from specverify.checks.two_arms import two_arms
from specverify.errors import PlanError, SpecverifyError, SubjectError
from specverify.judge import headline, judge
from specverify.models.fingerprint import fingerprint
from specverify.plan import plan_digest
from specverify.records import Certificate, CheckResult, Environment, Finding, ModelFingerprint, Verdict, worst
from specverify.scoring import ScoredTraces, score
from specverify.spill import Spill
from specverify.statistics.budget import require_reckoned
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from specverify.checks.check import Check, Round
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["CHECKS", "ON_REQUEST", "Store", "certify", "environment", "fingerprints", "run_check"]

CHECKS: tuple[Check, ...] = (
    compatibility,
    exactness,
    boundary,
    greedy,
    stopping,
    reproducibility,
    parameters,
    lossless,
    acceptance,
    cost,
)
"""In the order in which they run: cheaper and stronger answers first."""

ON_REQUEST: tuple[Check, ...] = (two_arms,)
"""Checks that cost as much as all of those, and run where they are named, or with `--budget deep`."""


class Store(Protocol):
    """Where finished checks are kept, so that an interrupted run goes on where it was."""

    def get(self, check_id: str) -> CheckResult | None:
        """A result of the same run, if there is one."""
        ...

    def put(self, result: CheckResult) -> None:
        """Keep a result."""
        ...

    def recall(self, asked: Round) -> ScoredTraces | None:
        """The answers to a round of the same run, if there are any."""
        ...

    def keep(self, asked: Round, scored: ScoredTraces) -> None:
        """Keep the answers to a round."""
        ...

    def scratch(self) -> Path | None:
        """A folder on a disk that has room, where evidence lies during the run; the system's without one."""
        ...


class Forgetful:
    """Keeps nothing."""

    def get(self, check_id: str) -> CheckResult | None:
        """Nothing."""
        del check_id
        return None

    def put(self, result: CheckResult) -> None:
        """Nowhere."""

    def recall(self, asked: Round) -> ScoredTraces | None:
        """Nothing."""
        del asked
        return None

    def keep(self, asked: Round, scored: ScoredTraces) -> None:
        """Nowhere."""

    def scratch(self) -> Path | None:
        """None of its own."""
        return None


def certify(
    subject: Subject,
    plan: Plan,
    *,
    watch: Watch | None = None,
    store: Store | None = None,
    fault: str = "",
    trust_remote_code: bool = False,
    digests: tuple[ModelFingerprint, ModelFingerprint | None] | None = None,
) -> Certificate:
    """Run the plan's checks on `subject`, judge them together, and say whether the pair may go out.

    `digests` are the `fingerprints` of the subject, where they are known already.

    Raises `PlanError` for the name of a check that doesn't exist, and what loading and decoding raise.
    """
    started = time.perf_counter()
    watch = Silent() if watch is None else watch
    store = Forgetful() if store is None else store
    transcripts = Transcripts(subject, store)
    results = []
    for check in chosen(plan):
        result = store.get(check.id)
        if result is None:
            result = run_check(check, subject, plan, transcripts=transcripts, watch=watch)
            store.put(result)
        results.append(result)
        _require_reckoned(results, plan)
    watch.close()
    judged, budget = judge(results, plan.false_fail_rate)
    target, draft = digests or fingerprints(subject)
    return Certificate(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=subject.command,
        verdict=worst(result.verdict for result in judged),
        headline=headline(judged, fault=fault, whole=not plan.only, engine=subject.engine.name),
        target=target,
        draft=draft,
        engine=subject.engine.name,
        fault=fault,
        trust_remote_code=trust_remote_code,
        environment=environment(subject.target.device, plan.dtype, tensor_parallel=processes_of(subject)),
        plan=dataclasses.asdict(plan),
        plan_sha256=plan_digest(plan),
        seed=plan.seed,
        num_prompts=len(subject.prompts),
        prompts_sha256=_prompts_sha256(subject),
        checks=judged,
        error_budget=budget,
        elapsed_s=time.perf_counter() - started,
    )


def chosen(plan: Plan) -> tuple[Check, ...]:
    """The checks that the plan names; the usual ones when it names none. Raises `PlanError` with the nearest name."""
    known = {check.id: check for check in (*CHECKS, *ON_REQUEST)}
    for name in plan.only:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            msg = f"there is no check named '{name}'; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(known)}"
            raise PlanError(msg)
    usual = {check.id for check in CHECKS} | ({check.id for check in ON_REQUEST} if plan.budget == "deep" else set())
    return tuple(check for check in known.values() if check.id in (plan.only or usual))


def _require_reckoned(results: Iterable[CheckResult], plan: Plan) -> None:
    """After each check, so that a run which no certificate can come of ends there, not hours later."""
    tests = [test for result in results for test in result.tests]
    num_e_processes = sum(test.log10_e is not None for test in tests)
    num_p_values = sum(test.p_value is not None for test in tests)
    require_reckoned(num_e_processes, num_p_values, plan.first_token_prompts)


class Transcripts:
    """Rounds that were decoded and scored, so that two checks that ask the same share the answers."""

    def __init__(self, subject: Subject, store: Store | None = None) -> None:
        """With a `store`, what our own decoder answered is kept; another engine may count what it is asked."""
        self._subject = subject
        self._store = store if store is not None and subject.decoder is not None else Forgetful()
        self._scored: dict[tuple[object, ...], ScoredTraces] = {}
        self._spill = Spill(store.scratch() if store is not None else None)

    def answer(self, asked: Round) -> ScoredTraces:
        """Decode and score a round, or recall it."""
        key = (type(asked) is Unscored, *asked)
        if key not in self._scored:
            recalled = self._store.recall(asked)
            scored = self._computed(asked) if recalled is None else recalled
            if recalled is None:
                self._store.keep(asked, scored)
            self._scored[key] = scored.on_disk(self._spill)
        return self._scored[key]

    def _computed(self, asked: Round) -> ScoredTraces:
        subject = self._subject
        traces = _answered(subject, asked)
        _require_known_ids(traces, subject.target.vocab_size)
        if isinstance(asked, Unscored):
            return ScoredTraces(tuple(traces))
        return score(
            traces,
            target=subject.target,
            draft=subject.draft,
            stages=subject.rule == "chain" and subject.drafts_follow_law,
            workers=subject.workers,
            elsewhere=subject.elsewhere,
        )


def _answered(subject: Subject, asked: Round) -> list[DecodeTrace]:
    """An engine of somebody else's may break in any way; that is a finding about it, not a bug in specverify."""
    try:
        return list(subject.engine.decode(asked))
    except SpecverifyError:
        raise
    except Exception as error:
        if subject.decoder is not None:  # it is our own
            raise
        msg = f"{subject.engine.name} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise SubjectError(msg) from error


def _require_known_ids(traces: Iterable[DecodeTrace], vocab_size: int) -> None:
    """Raise `SubjectError` for the first token that the target does not have: it has no score."""
    for trace in traces:
        for place, token in enumerate(trace.token_ids):
            if not 0 <= token < vocab_size:
                msg = (
                    f"id {token} was emitted as token {place} of {trace.request.id}, sample {trace.sample}, but the target "
                    f"has {vocab_size:,} ids; mask the rows that only pad the output layer"
                )
                raise SubjectError(msg)


def run_check(
    check: Check, subject: Subject, plan: Plan, *, transcripts: Transcripts | None = None, watch: Watch | None = None
) -> CheckResult:
    """Ask a check's rounds until it is decided, and conclude. An engine that breaks is a finding, not a crash."""
    watch = Silent() if watch is None else watch
    transcripts = Transcripts(subject) if transcripts is None else transcripts
    started = time.perf_counter()
    try:
        lacks: set[str] = set()
        honoured = _honoured(subject, check.rounds(subject, plan), lacks)
        rounds: Iterable[Round]
        if check.wanted_tokens:  # rounds are made as they are asked: a suspicion may want ten times as many
            rounds = honoured
            watch.stage(check.id, check.wanted_tokens(plan))
        else:
            rounds = list(honoured)
            watch.stage(check.id, len(rounds))
        scored = ScoredTraces()
        for asked in rounds:
            known = len(scored)
            scored = scored.merge(transcripts.answer(asked))
            watch.advance(len(scored) - known if check.wanted_tokens else 1)
            if check.decided(plan, scored):
                break
        if lacks and not scored.traces:
            result = _nothing_asked(check, subject, lacks)
        else:
            result = _with_unasked(check.conclude(subject, plan, scored), subject, lacks)
    except SubjectError as error:
        result = CheckResult(
            id=check.id,
            claim=check.claim,
            verdict=Verdict.FAIL,
            summary=f"the engine broke: {error}",
            findings=(Finding(text=str(error)),),
            reproduce=reproduce(subject, plan, check.id),
        )
    return dataclasses.replace(result, elapsed_s=time.perf_counter() - started)


def _honoured(subject: Subject, rounds: Iterable[Round], lacks: set[str]) -> Iterator[Round]:
    """Each round without the requests that set what the engine doesn't honour; `lacks` gets the names of that."""
    for asked in rounds:
        missing = {request: not_honoured(subject, request.params) for request in dict.fromkeys(asked)}
        if any(missing.values()):
            lacks.update(*missing.values())
            kept = [request for request in asked if not missing[request]]
            asked = Unscored(kept) if isinstance(asked, Unscored) else tuple(kept)  # noqa: PLW2901 - the round that is asked
        if asked:
            yield asked


def _nothing_asked(check: Check, subject: Subject, lacks: Iterable[str]) -> CheckResult:
    summary = f"{subject.engine.name} does not take {', '.join(sorted(lacks))}, so nothing was asked"
    return CheckResult(id=check.id, claim=check.claim, verdict=Verdict.NOT_RUN, summary=summary)


def _with_unasked(result: CheckResult, subject: Subject, lacks: Iterable[str]) -> CheckResult:
    """Say what was left out because the engine doesn't take it."""
    if not lacks:
        return result
    text = f"not asked, because {subject.engine.name} does not take it: {', '.join(sorted(lacks))}"
    return dataclasses.replace(result, findings=(*result.findings, Finding(text=text, severity=Verdict.PASS)))


def processes_of(subject: Subject) -> int:
    """Processes that hold the target together."""
    return int(getattr(subject.target, "num_processes", 1))


def environment(device: torch.device, dtype: str, *, tensor_parallel: int = 1) -> Environment:
    """Where this run is made."""
    name = f"{device.type}: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    return Environment(
        specverify=__version__,
        python=sys.version.split()[0],
        torch=torch.__version__,
        transformers=version("transformers"),
        device=name,
        dtype=dtype,
        num_threads=torch.get_num_threads(),
        platform=platform.platform(),
        cpu=_cpu(),
        tensor_parallel=tensor_parallel,
    )


def _prompts_sha256(subject: Subject) -> str:
    canonical = json.dumps([dataclasses.astuple(prompt) for prompt in subject.prompts], separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def fingerprints(subject: Subject) -> tuple[ModelFingerprint, ModelFingerprint | None]:
    """Digests of target and draft; every file is read, so ask once."""
    if subject.pair is None:
        bare = ModelFingerprint(
            name=subject.target.name, architecture="table", num_parameters=0, vocab_size=subject.target.vocab_size,
            weights_sha256="", tokenizer_sha256="", template_sha256="", config_sha256="",
        )  # fmt: skip
        return bare, None
    draft = subject.pair.draft
    return fingerprint(subject.pair.target), fingerprint(draft) if draft is not None else None
