"""The kill matrix: every planted fault against every check of correctness, measured.

Note [Kill matrix]: a check that a fault passes is blind to that class of bugs; a fault that every check passes is a hole in
the suite, and a check that kills nothing proves nothing. So both are looked for, on models small enough to run all of it.
Each cell is judged by itself: the check gets the whole error budget, as it would with `--only`.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.certify import CHECKS, Transcripts, run_check
from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PlanError, SpecverifyError
from specverify.faults import FAULTS, Fault, find_fault
from specverify.judge import judge
from specverify.models.hashed import VOCAB_SIZE, HashedModel, detokenize
from specverify.plan import Plan
from specverify.records import CheckResult, Verdict
from specverify.subject import EncodedPrompt, Subject
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.checks.check import Check
    from specverify.watch import Watch

__all__ = ["CORRECTNESS", "SMALL_PLAN", "Cell", "KillMatrix", "kill_matrix", "measured", "small_subject"]

CORRECTNESS: tuple[Check, ...] = tuple(check for check in CHECKS if check.id not in {"compatibility", "cost"})
"""Checks that say that texts or their law are wrong; the others look at tokenizer files and at the clock."""

SMALL_PLAN = Plan(
    lossless_tokens=14_000, max_new_tokens=16, parameter_tokens=320, greedy_prompts=8, batch_size=128, coupled_draws=320,
    largest_undetected_shift_per_setting=0.3,
    largest_undetected_acceptance=0.2,
)  # fmt: skip
"""What is asked of the small models."""


def small_subject() -> Subject:
    """A healthy decoder over hashed models of 24 ids, the draft a good way from the target, and sixteen prompts."""
    target = HashedModel()
    draft = HashedModel("draft", seed=1, near=target, disturbed_by=1.0)
    decoder = Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE), detokenize=detokenize)
    prompts = tuple(
        EncodedPrompt(id=f"p{number}", domain="test", token_ids=tuple(range(number, number + 4 + number % 3)))
        for number in range(16)
    )
    return Subject(
        engine=ReferenceEngine(decoder),
        target=target,
        draft=draft,
        prompts=prompts,
        eos_token_ids=(VOCAB_SIZE - 1,),
        decoder=decoder,
        rule="chain",
        command="specverify faults",
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one check says of one fault."""

    fault: str
    check_id: str
    verdict: Verdict
    num_samples: int
    sample_unit: str
    """`tokens`, `texts`, `exact laws`, `requests`."""
    crossed_at_tokens: int | None
    """Tokens after which the e-process of the stream was proof, to a three-hundredth of them; None where it wasn't."""
    summary: str

    @property
    def killed(self) -> bool:
        """Whether the check caught the fault."""
        return self.verdict is Verdict.FAIL


@dataclass(frozen=True, kw_only=True)
class KillMatrix:
    """Every cell that was measured, and what is missing."""

    faults: tuple[Fault, ...]
    check_ids: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, fault: str, check_id: str) -> Cell:
        """Of one fault and one check; both must have been measured."""
        return next(cell for cell in self.cells if (cell.fault, cell.check_id) == (fault, check_id))

    @property
    def missed(self) -> tuple[Cell, ...]:
        """Cells of a fault and a check that it names, which let it pass."""
        names = {(fault.name, check_id) for fault in self.faults for check_id in fault.caught_by}
        return tuple(cell for cell in self.cells if (cell.fault, cell.check_id) in names and not cell.killed)

    @property
    def empty_rows(self) -> tuple[str, ...]:
        """Faults that nothing caught."""
        caught = {cell.fault for cell in self.cells if cell.killed}
        return tuple(fault.name for fault in self.faults if fault.name not in caught)

    @property
    def empty_columns(self) -> tuple[str, ...]:
        """Checks that caught nothing."""
        catching = {cell.check_id for cell in self.cells if cell.killed}
        return tuple(check_id for check_id in self.check_ids if check_id not in catching)


def measured(
    fault: Fault | None, checks: Sequence[Check], subject: Subject | None = None, plan: Plan = SMALL_PLAN
) -> tuple[CheckResult, ...]:
    """Each check's judged result on the subject with the fault in it (None: as it is). Checks share their transcripts."""
    healthy = small_subject() if subject is None else subject
    asked_of = healthy if fault is None else fault.plant(healthy)
    transcripts = Transcripts(asked_of)
    return tuple(_judged(check, asked_of, plan, transcripts) for check in checks)


def _judged(check: Check, subject: Subject, plan: Plan, transcripts: Transcripts) -> CheckResult:
    """One check against the error budget; a fault that breaks the decoder altogether is caught by nobody."""
    try:
        result = run_check(check, subject, plan, transcripts=transcripts)
    except SpecverifyError as error:
        broke = f"{type(error).__name__}: {error}"
        return CheckResult(id=check.id, claim=check.claim, verdict=Verdict.NOT_RUN, summary=broke)
    return judge([result], plan.false_fail_rate)[0][0]


def kill_matrix(
    faults: Sequence[Fault] = FAULTS,
    check_ids: Sequence[str] = (),
    *,
    subject: Callable[[], Subject] = small_subject,
    plan: Plan = SMALL_PLAN,
    workers: int = 1,
    watch: Watch | None = None,
) -> KillMatrix:
    """Plant each fault and ask each check (all of correctness where none is named).

    `subject` makes the healthy subject, once a worker process; with more than one worker it must be a function of a module.
    Raises `PlanError` for the name of a check that is not one of correctness.
    """
    watch = Silent() if watch is None else watch
    chosen = _chosen(check_ids)
    ids = tuple(check.id for check in chosen)
    watch.stage("faults", len(faults))
    rows: dict[str, tuple[Cell, ...]] = {}
    if workers == 1 or len(faults) < 2:
        healthy = subject()
        for fault in faults:
            rows[fault.name] = _row(fault, chosen, healthy, plan)
            watch.advance()
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            tasks = {pool.submit(_row_by_name, fault.name, ids, subject, plan): fault.name for fault in faults}
            for done in as_completed(tasks):
                rows[tasks[done]] = done.result()
                watch.advance()
    watch.close()
    cells = tuple(cell for fault in faults for cell in rows[fault.name])
    return KillMatrix(faults=tuple(faults), check_ids=ids, cells=cells)


def _chosen(check_ids: Sequence[str]) -> tuple[Check, ...]:
    known = {check.id: check for check in CORRECTNESS}
    for name in check_ids:
        if name not in known:
            msg = f"there is no check of correctness named '{name}'; known: {', '.join(known)}"
            raise PlanError(msg)
    return tuple(check for check in CORRECTNESS if not check_ids or check.id in check_ids)


def _row_by_name(name: str, check_ids: Sequence[str], subject: Callable[[], Subject], plan: Plan) -> tuple[Cell, ...]:
    """A row in a process of its own: what crosses the border are names."""
    return _row(find_fault(name), _chosen(check_ids), subject(), plan)


def _row(fault: Fault, checks: Sequence[Check], healthy: Subject, plan: Plan) -> tuple[Cell, ...]:
    return tuple(_cell(fault, result) for result in measured(fault, checks, healthy, plan))


def _cell(fault: Fault, result: CheckResult) -> Cell:
    return Cell(
        fault=fault.name,
        check_id=result.id,
        verdict=result.verdict,
        num_samples=result.num_samples,
        sample_unit=result.sample_unit,
        crossed_at_tokens=_crossing(result),
        summary=result.summary,
    )


def _crossing(result: CheckResult) -> int | None:
    """Where the e-process that the check draws first reaches its limit."""
    for plot in result.plots:
        if plot.id.endswith("/e_process"):
            path, limit = plot.series
            return next((int(x) for x, y in zip(path.x, path.y, strict=True) if y >= limit.y[0]), None)
    return None
