"""From the name of an engine to its certificate: the pair is written, the arms are opened, the cells held.

Note [Pairs of a run]: a near draft is accepted often enough that stops fall at every offset of a block; an opposed one makes
every leak of the draft large. So all cells run on the near pair, and the law and greedy exactness once more on the opposed
one, there with one draft a step, too, and on the near one with eight and sixteen.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specverify.callables import resolved
from specverify.checks.noise import noise_of_engine
from specverify.conformance.cells import CELLS, certificate_of, engine_plan, held, hold_cells
from specverify.conformance.laws import laws_of_folders, laws_of_models, off_subject, on_subject
from specverify.engines import Capability, EngineSettings
from specverify.engines.fake import FakeEngine, letters
from specverify.engines.function import decodes
from specverify.engines.registry import opened
from specverify.errors import ClaimViolated, PlanError, SubjectError, UsageError
from specverify.faults.engine import find_engine_fault
from specverify.models.calibration import write_calibration_pair
from specverify.records import Verdict
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specverify.conformance.laws import Laws
    from specverify.engines import Engine
    from specverify.plan import Plan
    from specverify.records import Certificate, CheckResult
    from specverify.watch import Watch

__all__ = ["Arms", "EngineRun", "opened_arms", "run_conformance", "run_engine"]

_DRAFT_COUNTS = ((1, True), (8, False), (16, False))
"""And whether the draft is opposed: only a near one is accepted deep inside a long block."""
_VARIED = ("greedy", "lossless")
"""Cells that are held once more with other drafts."""
_REOPENED = ("reference", "transformers", "transformers-lookup", "fake")
"""Engines of which a second start costs next to nothing."""
_FEW_TOKENS = 2_500


def _nobody(sentence: str) -> None:
    del sentence


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What `specverify qualify ENGINE` was asked."""

    name: str
    settings: EngineSettings
    """With an empty path as the target, a calibration pair is written for the run."""
    off: str = ""
    """Another engine, for the OFF arm."""
    fault: str = ""
    """Planted in the fake, to see a cell fail."""
    command: str = "specverify qualify"
    given: Callable[..., Any] | None = None
    """The engine itself, or what makes one, in place of a name that is looked up."""

    @property
    def calibrated(self) -> bool:
        """Whether the pair is ours, so that others like it can be written."""
        return self.settings.target == Path()


@dataclass(frozen=True)
class Arms:
    """An engine that is open, without speculation, and so once more; None where there is none."""

    on: Engine
    off: Engine | None
    off2: Engine | None


@contextlib.contextmanager
def opened_arms(
    name: str,
    settings: EngineSettings,
    *,
    off: str = "",
    given: Callable[..., Any] | None = None,
    say: Callable[[str], None] = _nobody,
) -> Iterator[Arms]:
    """All three; whatever they started ends with the context.

    OFF is the engine that `off` names, or the engine itself where speculation can be switched off, or a user's factory
    called without a draft. Where it is none of these, the target alone is decoded here in its place.
    """
    with contextlib.ExitStack() as stack:
        on = stack.enter_context(opened(name, settings, given=given, say=say))
        without = replace(settings, draft=None)
        if off:
            yield Arms(on, stack.enter_context(opened(off, without, say=say)), None)
        elif Capability.SPECULATION_SWITCH in on.capabilities:
            again = stack.enter_context(opened(name, without, say=say)) if name in _REOPENED else None
            yield Arms(on, on, again)
        elif (given or ":" in name) and not decodes(given or resolved(name)):
            yield Arms(on, *(stack.enter_context(opened(name, without, given=given, say=say)) for _ in range(2)))
        else:
            yield Arms(on, None, None)


def run_engine(
    run: EngineRun, plan: Plan, *, watch: Watch | None = None, say: Callable[[str], None] = _nobody
) -> Certificate:
    """Write the pair, open the engine, hold every cell. Raises `UsageError` for what can't be opened."""
    watch = Silent() if watch is None else watch
    started = time.perf_counter()
    if run.fault and run.name != "fake":
        msg = f"a fault can be planted in the engine fake alone, not in {run.name}"
        raise PlanError(msg)
    with tempfile.TemporaryDirectory(prefix="specverify-") as folder:
        settings = settings_of(run, Path(folder) / "near", plan, opposed=False)
        with opened_arms(run.name, settings, off=run.off, given=run.given, say=say) as arms:
            laws = laws_of(arms.on, settings, plan, name="the calibration pair" if run.calibrated else "")
            laws = _with_noise(laws, arms, settings, plan, say)
            on = _planted(arms.on, run.fault)
            results = hold_cells(on, arms.off, arms.off2, laws, plan, watch=watch, command=run.command)
        if run.calibrated and not run.fault:
            results += _variants(run, plan, Path(folder), watch, say)
    watch.close()
    told = {"name": run.name, "options": dict(settings.options), "max_length": settings.max_length}
    return certificate_of(
        results, on.name, laws, plan, command=run.command, fault=run.fault, started=started, settings=told
    )


_HALF = {"bfloat16", "float16"}
"""Values of the option `dtype` under which an engine rounds far more than the laws that it is held against."""
_ONE_HEAD = {"openai", "vllm", "sglang", "tgi", "onnxruntime"}
"""Engines whose kernels may not take narrow heads, or whose exporter takes every layer with as many outputs as there are ids for the last."""


def settings_of(run: EngineRun, folder: Path, plan: Plan, *, opposed: bool) -> EngineSettings:
    """The user's own models, or a calibration pair."""
    given = replace(run.settings, num_speculative_tokens=plan.num_speculative_tokens)
    if not run.calibrated:
        return given if given.eos_token_ids else replace(given, eos_token_ids=_eos_of(given.target))
    if given.url:
        msg = (
            f"the server at {given.url} already has its models, so say which: --target DIR --draft DIR --max-length N; "
            "`specverify qualify --write-pair DIR` writes a pair that shows most"
        )
        raise PlanError(msg)
    if run.name == "fake":
        options = dict(given.options) | {"opposed": "yes" if opposed else "no"}
        return replace(given, options=tuple(options.items()), eos_token_ids=(0,))
    pair = write_calibration_pair(
        folder,
        opposed=opposed,
        seed=plan.seed,
        gguf=run.name in {"llamacpp", "openvino"},
        own_tokenizer=_draft_has_a_tokenizer_of_its_own(given),
        half=run.name == "openvino",
        one_head=run.name in _ONE_HEAD,
    )
    return replace(given, target=pair.target, draft=pair.draft, eos_token_ids=(pair.eos_token_id,))


def _draft_has_a_tokenizer_of_its_own(settings: EngineSettings) -> bool:
    """An option of transformers, under which its drafts go through text; the draft's law is then none over the target's ids."""
    return dict(settings.options).get("different_tokenizers") == "yes"


def _eos_of(folder: Path) -> tuple[int, ...]:
    """What the folder says ends a text; a folder that can't be read is refused when the model is loaded."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def laws_of(engine: Engine, settings: EngineSettings, plan: Plan, *, name: str = "") -> Laws:
    """Of the folders; of its own where the engine is the fake. `name` is told in place of a folder that is ours."""
    if isinstance(engine, FakeEngine):
        return laws_of_models(
            engine.target, engine.draft, eos_token_ids=settings.eos_token_ids, seed=plan.seed, detokenize=letters
        )
    eos = settings.eos_token_ids
    laws = laws_of_folders(
        settings.target, settings.draft, eos_token_ids=eos, max_length=settings.max_length, seed=plan.seed, name=name
    )
    return replace(laws, draft=None) if _draft_has_a_tokenizer_of_its_own(settings) else laws


def _with_noise(laws: Laws, arms: Arms, settings: EngineSettings, plan: Plan, say: Callable[[str], None]) -> Laws:
    """With the noise of an engine that is asked for half precision, as its own OFF arm shows it; any other is allowed none."""
    if arms.off is None or dict(settings.options).get("dtype") not in _HALF:
        return laws
    alone = off_subject(arms.off, laws, command="")
    with contextlib.suppress(
        SubjectError, UsageError
    ):  # what breaks, or is refused, is for the cell that asks it to say
        laws = replace(laws, engine_noise=noise_of_engine(alone.engine, alone, plan))
        say(
            f"in half precision the engine's logits are seen to lie within {laws.engine_noise:.2g} of the target's without speculation"
        )
    return laws


def _planted(engine: Engine, fault: str) -> Engine:
    if not fault:
        return engine
    assert isinstance(engine, FakeEngine)
    return find_engine_fault(fault).plant(engine)


def _variants(
    run: EngineRun, plan: Plan, folder: Path, watch: Watch, say: Callable[[str], None]
) -> Iterator[CheckResult]:
    """The law and greedy exactness with the opposed draft, and with other numbers of drafts; the OFF arm is known by then."""
    chosen = [cell for cell in CELLS if cell.id in _VARIED and (not plan.only or cell.id in plan.only)]
    if not chosen:
        return
    few = replace(plan, lossless_tokens=min(_FEW_TOKENS, plan.lossless_tokens), largest_undetected_shift=0.15)
    varied = [("opposed draft", plan, True)]
    varied += [
        (f"{count} drafts", replace(few, num_speculative_tokens=count), opposed) for count, opposed in _DRAFT_COUNTS
    ]
    for name, its, opposed in varied:
        settings = settings_of(run, folder / ("opposed" if opposed else "near"), its, opposed=opposed)
        with opened_arms(run.name, settings, off=run.off, given=run.given, say=say) as arms:
            laws = _with_noise(laws_of(arms.on, settings, its), arms, settings, its, say)
            subject = on_subject(arms.on, arms.off, laws, command=run.command)
            for cell in chosen:
                yield _named(held(cell, subject, its, watch), name)


def _named(result: CheckResult, name: str) -> CheckResult:
    """Under a name of its own, and with one p-value at most: the smallest, for as many as they are (Bonferroni).

    A run's p-values share one budget, and each costs the others. So `lossless` keeps that one and its e-process, and
    `greedy` none: with other drafts it is held by the tokens beyond the measured noise alone.
    """
    kept = [replace(test, name=f"{name}: {test.name}") for test in result.tests if test.log10_e is not None]
    others = [test for test in result.tests if test.p_value is not None]
    if others and result.id == "lossless":
        least = min(others, key=lambda test: test.p_value or 0.0)
        together = min(1.0, len(others) * (least.p_value or 0.0))
        kept.append(replace(least, name=f"{name}: smallest of {len(others)}, {least.name}", p_value=together))
    return replace(result, id=f"{result.id}, {name}", tests=tuple(kept))


# ------------------------------------------------------------------------------------------- in an author's own suite


def run_conformance(
    engine: Callable[..., Any] | str, *, settings: EngineSettings | None = None, budget: str = "quick", seed: int = 17
) -> Certificate:
    """One call for an engine author's own tests: every cell on a calibration pair that is written for it.

    `engine` is a factory `(EngineSettings) -> Engine`, a context manager of one, a function that decodes or a factory of
    one, or a name as on the command line. The OFF arm is the same engine with `speculation=False`, where it can do that, or
    the factory's without a draft.
    Raises `ClaimViolated`, which names each cell that fails with its evidence.

        def test_my_engine_is_sound():
            run_conformance(my_engine)
    """
    plan = engine_plan(budget, seed=seed)
    given = settings if settings is not None else EngineSettings(target=Path())
    if isinstance(engine, str):
        run = EngineRun(name=engine, settings=given, command=f"specverify qualify {engine}")
    else:
        name = (
            f"{engine.__module__}:{engine.__qualname__}" if hasattr(engine, "__qualname__") else type(engine).__name__
        )
        run = EngineRun(name=name, settings=given, given=engine, command=f"specverify qualify {name}")
    certificate = run_engine(run, plan)
    if certificate.verdict is Verdict.FAIL:
        failed = [f"  {one.id}: {one.summary}" for one in certificate.checks if one.verdict is Verdict.FAIL]
        msg = "\n".join([certificate.headline, *failed])
        raise ClaimViolated(msg)
    return certificate
