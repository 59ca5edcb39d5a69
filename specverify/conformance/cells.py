"""The cells of an engine, each held on the OFF arm first, and judged together against one error budget."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING

from specverify.certify import environment, run_check
from specverify.checks.check import asked
from specverify.checks.evidence import in_doubt
from specverify.checks.greedy import greedy
from specverify.checks.lossless import lossless
from specverify.checks.parameters import over
from specverify.checks.reproducibility import reproducibility
from specverify.conformance.laws import off_subject, on_subject
from specverify.conformance.state import context, neighbours, prefix_cache
from specverify.conformance.stops import stop_strings, stops
from specverify.conformance.text import schema, streams
from specverify.conformance.told import counters, drafting, logprobs, vocabulary
from specverify.engines.arms import Guarded
from specverify.errors import PlanError, SpecverifyError, UsageError
from specverify.judge import judge
from specverify.plan import Plan, plan_digest
from specverify.records import Certificate, CheckResult, Finding, SamplingParams, Verdict, worst
from specverify.statistics.budget import MOST_E_PROCESSES, most_p_values, require_reckoned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specverify.checks.check import Check
    from specverify.conformance.laws import Laws
    from specverify.engines import Engine
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = [
    "CELLS",
    "ENGINE_BUDGETS",
    "OFF_CELLS",
    "certificate_of",
    "engine_plan",
    "held",
    "hold_cells",
    "qualify_engine",
    "verdict_of",
]

_GRID: tuple[tuple[str, SamplingParams], ...] = (
    ("temperature", SamplingParams(temperature=0.3)),
    ("hot", SamplingParams(temperature=1.5)),
    ("top_k", SamplingParams(top_k=5)),
    ("top_p", SamplingParams(top_p=0.6)),
    ("min_p", SamplingParams(min_p=0.2)),
    ("repetition_penalty", SamplingParams(repetition_penalty=1.8)),
    ("banned_words", SamplingParams(banned_token_ids=())),
    ("no_repeat", SamplingParams(no_repeat_ngram_size=2)),
    ("combined", SamplingParams(temperature=0.8, top_k=8, top_p=0.9)),
)
"""Settings that cut deep into a narrow vocabulary."""

_parameters = over(_GRID)

CELLS: tuple[Check, ...] = (
    drafting,
    vocabulary,
    greedy,
    lossless,
    _parameters,
    stops,
    stop_strings,
    reproducibility,
    neighbours,
    prefix_cache,
    context,
    counters,
    logprobs,
    streams,
    schema,
)
"""Cheaper and stronger answers first."""
OFF_CELLS: tuple[Check, ...] = (greedy, lossless, _parameters, stops, stop_strings, reproducibility, streams, schema)
"""What the engine without speculation must do, too, before anything can be said of it with speculation."""
_NEEDED = ("drafting", "greedy", "lossless")
"""Cells without which no engine passes."""

ENGINE_BUDGETS: dict[str, dict[str, int | float]] = {
    "quick": {
        "lossless_tokens": 5_000, "parameter_tokens": 480, "greedy_prompts": 12, "first_token_samples": 200,
        "first_token_prompts": 2, "batch_size": 192, "largest_undetected_shift": 0.1,
        "largest_undetected_shift_per_setting": 0.3,
    },
    "standard": {
        "lossless_tokens": 30_000, "parameter_tokens": 768, "greedy_prompts": 24, "first_token_samples": 600,
        "first_token_prompts": 2, "batch_size": 480,
    },
    "deep": {
        "lossless_tokens": 1_000_000, "parameter_tokens": 20_000, "greedy_prompts": 24, "first_token_samples": 20_000,
        "batch_size": 9_600, "largest_undetected_shift": 0.01, "largest_undetected_shift_per_setting": 0.05,
    },
}  # fmt: skip
"""What each `--budget` of `qualify ENGINE` changes in the plan."""


def engine_plan(
    budget: str = "standard", *, seed: int = 17, num_speculative_tokens: int = 3, only: Sequence[str] = ()
) -> Plan:
    """A plan for `qualify_engine`. Raises `PlanError` for a budget or a cell that isn't there."""
    for kind, names, known in (("budget", [budget], ENGINE_BUDGETS), ("cell", only, [cell.id for cell in CELLS])):
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.4)
                msg = f"there is no {kind} named '{name}'; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(known)}"
                raise PlanError(msg)
    usual = Plan(
        budget=budget, seed=seed, num_speculative_tokens=num_speculative_tokens, max_new_tokens=16, only=tuple(only)
    )
    return replace(usual, **ENGINE_BUDGETS[budget])  # type: ignore[arg-type]  # the table holds ints and floats


def hold_cells(
    engine: Engine,
    off: Engine | None,
    off2: Engine | None,
    laws: Laws,
    plan: Plan,
    *,
    watch: Watch | None = None,
    command: str = "specverify qualify",
) -> list[CheckResult]:
    """Hold every cell on the engine, the OFF arm first; `off2` is a second start of it, which shows what chance does.

    Never raises for what the engine does: what breaks is a finding.
    """
    on = on_subject(engine, off, laws, command=command)
    on = replace(on, engine=_without_refused(on, plan))
    chosen = [cell for cell in CELLS if not plan.only or cell.id in plan.only]
    results: list[CheckResult] = []
    doubtful: set[str] = set()
    if off is not None:
        alone = off_subject(off, laws, command=command)
        alone = replace(alone, engine=_without_refused(alone, plan))
        thin = replace(plan, lossless_tokens=max(5_000, plan.lossless_tokens // 4), largest_undetected_shift=0.1)
        results += [_off(held(cell, alone, thin, watch)) for cell in OFF_CELLS if cell in chosen]
        judged, _ = judge(
            results, plan.false_fail_rate, least_e_processes=MOST_E_PROCESSES,
            least_p_values=most_p_values(plan.first_token_prompts),
        )  # fmt: skip  # of the whole run: what fails here by chance fails there, too, and counts once
        doubtful = {result.id.removeprefix("off/") for result in judged if result.verdict is Verdict.FAIL}
        if off2 is not None:
            results.append(_again(alone, off_subject(off2, laws, command=command), plan))
    results += [_in_doubt(cell) if cell.id in doubtful else held(cell, on, plan, watch) for cell in chosen]
    return results


def qualify_engine(
    engine: Engine,
    off: Engine | None,
    off2: Engine | None,
    laws: Laws,
    plan: Plan,
    *,
    watch: Watch | None = None,
    command: str = "specverify qualify",
    fault: str = "",
) -> Certificate:
    """Hold every cell on an engine that is open, and judge them together; see `hold_cells`."""
    started = time.perf_counter()
    results = hold_cells(engine, off, off2, laws, plan, watch=watch, command=command)
    return certificate_of(results, engine.name, laws, plan, command=command, fault=fault, started=started)


def certificate_of(
    results: Sequence[CheckResult],
    name: str,
    laws: Laws,
    plan: Plan,
    *,
    command: str,
    started: float,
    fault: str = "",
    settings: Mapping[str, object] | None = None,
) -> Certificate:
    """All cells against one error budget."""
    judged, budget = judge(results, plan.false_fail_rate)
    require_reckoned(budget.num_e_processes, budget.num_p_values, plan.first_token_prompts)
    whole = not plan.only
    return Certificate(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        verdict=verdict_of(judged, whole=whole),
        headline=_headline(name, judged, fault=fault, whole=whole),
        target=laws.fingerprints[0],
        draft=laws.fingerprints[1],
        engine=name,
        fault=fault,
        environment=environment(laws.target.device, plan.dtype),
        plan={**asdict(plan), **{f"engine_{key}": value for key, value in (settings or {}).items()}},
        plan_sha256=plan_digest(plan),
        seed=plan.seed,
        num_prompts=len(laws.prompts),
        checks=judged,
        error_budget=budget,
        elapsed_s=time.perf_counter() - started,
    )


def _without_refused(subject: Subject, plan: Plan) -> Engine:
    """The engine, with what it refuses aloud taken from its parameters: refused is fine, ignored is not."""
    refused: set[str] = set()
    usual = SamplingParams(max_new_tokens=2, eos_token_ids=subject.eos_token_ids)
    wanted: dict[str, SamplingParams] = {
        "temperature": replace(usual, temperature=0.6),
        "top_k": replace(usual, top_k=5),
        "top_p": replace(usual, top_p=0.6),
        "min_p": replace(usual, min_p=0.2),
        "repetition_penalty": replace(usual, repetition_penalty=1.8),
        "no_repeat_ngram_size": replace(usual, no_repeat_ngram_size=2),
        "min_new_tokens": replace(usual, min_new_tokens=1),
        "banned_token_ids": replace(usual, banned_token_ids=((subject.prompts[0].token_ids[0],),)),
        "stop_token_ids": replace(usual, stop_token_ids=(subject.prompts[0].token_ids[0],)),
    }
    for name, params in wanted.items():
        if name in subject.engine.parameters:
            try:
                list(subject.engine.decode(asked(f"refused/{name}", plan, subject.prompts[:1], params)))
            except UsageError:
                refused.add(name)
            except SpecverifyError:  # it breaks: the cell that asks it in earnest reports that
                pass
    return Guarded(subject.engine, frozenset(refused))


def held(cell: Check, subject: Subject, plan: Plan, watch: Watch | None = None) -> CheckResult:
    """One cell on one subject; what the engine refuses to be asked is NOT_RUN."""
    try:
        result = run_check(cell, subject, plan, watch=watch)
    except UsageError as error:
        result = CheckResult(id=cell.id, claim=cell.claim, verdict=Verdict.NOT_RUN, summary=f"not supported: {error}")
    return replace(result, plots=())


def _off(result: CheckResult) -> CheckResult:
    """The same claim about the target alone. Where it drafts nothing, that is as it should be."""
    return replace(
        result,
        id=f"off/{result.id}",
        claim=f"without speculation: {result.claim}",
        tests=tuple(replace(test, name=f"off: {test.name}") for test in result.tests),
        advice="mend the adapter, or what the engine does without speculation; until then nothing follows about speculation"
        if in_doubt(result)
        else result.advice,
    )


def _in_doubt(cell: Check) -> CheckResult:
    summary = "not held: without speculation it fails as well, so the reference or the adapter is in doubt"
    return CheckResult(id=cell.id, claim=cell.claim, verdict=Verdict.NOT_RUN, summary=summary)


def _again(first: Subject, second: Subject, plan: Plan) -> CheckResult:
    """Two starts without speculation: how many greedy texts differ by themselves."""
    claim = "without speculation: a second start says the same at temperature 0"
    params = SamplingParams(temperature=0, max_new_tokens=plan.max_new_tokens, eos_token_ids=first.eos_token_ids)
    requests = asked("off/again", plan, first.prompts, params, speculation=False)
    try:
        texts = [[trace.token_ids for trace in subject.engine.decode(requests)] for subject in (first, second)]
    except Exception as error:  # noqa: BLE001 - whatever breaks in somebody's engine is a finding
        return CheckResult(id="off/again", claim=claim, verdict=Verdict.FAIL, summary=f"the engine broke: {error}")
    differing = sum(one != other for one, other in zip(*texts, strict=True))
    text = f"{differing} of {len(requests)} greedy texts differ between two starts without speculation"
    return CheckResult(
        id="off/again",
        claim=claim,
        verdict=Verdict.PASS,
        summary=text,
        findings=(Finding(text=text, severity=Verdict.PASS),) if differing else (),
        num_samples=len(requests),
        sample_unit="texts",
        measurements={"num_differing_texts": differing},
    )


# ------------------------------------------------------------------------------------------------------------ verdicts


def verdict_of(results: Sequence[CheckResult], *, whole: bool = True) -> Verdict:
    """FAIL over INCONCLUSIVE over PASS; a whole run that could not hold one of the needed cells is INCONCLUSIVE."""
    verdict = worst(result.verdict for result in results)
    by_id = {result.id: result.verdict for result in results}
    lacks = whole and any(by_id.get(name) is not Verdict.PASS for name in _NEEDED)
    return Verdict.INCONCLUSIVE if verdict is Verdict.PASS and lacks else verdict


def _headline(name: str, results: Sequence[CheckResult], *, fault: str, whole: bool) -> str:
    """One sentence."""
    failed = [result.id for result in results if result.verdict is Verdict.FAIL]
    off = [each for each in failed if each.startswith("off/")]
    if fault:
        return f"The planted fault '{fault}' was " + (f"caught by {', '.join(failed)}." if failed else "NOT caught.")
    if off:
        return (
            f"{name} fails without speculation ({', '.join(off)}): the reference or the adapter is in doubt, so settle that "
            "before anything is said about speculation."
        )
    if failed:
        return f"Speculation in {name} is not sound: {', '.join(failed)} failed."
    thin = [result.id for result in results if result.verdict is Verdict.INCONCLUSIVE]
    not_run = [result.id for result in results if result.verdict is Verdict.NOT_RUN]
    if thin:
        return f"Not decided for {name}: {', '.join(thin)}."
    left_out = f" ({', '.join(not_run)} did not run)" if not_run else ""
    if whole and verdict_of(results) is not Verdict.PASS:
        return f"Not decided for {name}: a needed cell did not run{left_out}."
    return (
        f"No difference from the target alone was found in {name}: {len(results) - len(not_run)} cells hold{left_out}."
    )
