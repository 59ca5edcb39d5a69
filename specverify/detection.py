"""After how many tokens is each structured fault found, and by what? The tests of this harness beside those in use.

Note [Detection]: every fault is planted in the reference decoder over a real pair, and its stream of tokens is looked at
in all ways: by the e-process of the `lossless` check, which may be looked at after each token; by tests of a fixed number of
tokens (KS and chi-square of the PIT, chi-square of one context, MMD against target-only text), which are given the first
number on a grid at which they reject, though nobody may look that often; and by the criteria that public engines use. The
first stream of a fault is as long as those need; after that, and in all others, a stream ends with the proof of the e-process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping  # noqa: TC003 - the record is read back by its annotations
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specverify import criteria
from specverify.checks.check import asked, derived_seed, sampling, spread
from specverify.checks.evidence import ORDERS, STAGES, e_process
from specverify.checks.lossless import law_after
from specverify.errors import PlanError
from specverify.faults import FAULTS, Fault
from specverify.faults.rule import rule
from specverify.records import SamplingParams, count
from specverify.scoring import ScoredTraces, score
from specverify.stages import STAGE_FAULTS, Role
from specverify.statistics.categorical import chi_square
from specverify.statistics.two_sample import bigram_gram, mmd
from specverify.statistics.uniformity import chi_square_uniform, kolmogorov_smirnov
from specverify.step_law import step_distance
from specverify.verification.lossy import LOSSY, above_threshold
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.subject import Subject
    from specverify.watch import Watch

__all__ = ["CRITERIA", "FIXED_TESTS", "NAMES", "PROOF", "Detection", "Detections", "Run", "detections", "known_faults"]

PROOF = 6.0
"""log10 of the e-value that is proof."""
_RATE = 1e-6
"""At which the tests of a fixed number of tokens reject."""
_MMD_RATE = 1e-3
"""MMD's p-value comes from permutations: 1e-6 would need a million of them at each number of texts."""
_GRID = tuple(round(100 * 2 ** (step / 2)) for step in range(22))
_ROUND_PROMPTS = 32
_ROUND_TOKENS = 24
_CONTEXTS = 32
"""At which the TV distance is computed."""
_GREEDY_PROMPTS = 16

_ACCEPTED_MORE = "drafts accepted more often than min(1, p/q)"
_NOT_RESIDUAL, _USED_NOISE = STAGES["pit_residual"], STAGES["pit_residual_id"]
_NOT_REPORTED, _NOT_BONUS = STAGES["pit_draft"], STAGES["pit_bonus"]
(
    _SHARPER, _FLATTER, _TRUNCATED, _ACCEPTED_BY_DRAFT, _INFLATED, _TYPICAL, _THRESHOLD, _FROM_TARGET, _NOT_CLAMPED,
    _OTHER_ROW, _REJECTING_NOISE, _DRAFTING_NOISE, _BONUS_FROM_DRAFT,
) = STAGE_FAULTS  # fmt: skip

NAMES: dict[str, tuple[str, ...]] = {
    "residual-from-target": (_FROM_TARGET, _NOT_RESIDUAL, "residual drawn from the target"),
    "residual-wrong-row": (_OTHER_ROW, _NOT_RESIDUAL),
    "residual-not-clamped": (_NOT_CLAMPED, _NOT_RESIDUAL, "residual not clamped at zero"),
    "bonus-from-draft": (_BONUS_FROM_DRAFT, _NOT_BONUS),
    "draft-temperature": (_SHARPER, _NOT_REPORTED, "draft sharper than reported"),
    "raw-draft-probs": (_TRUNCATED, _NOT_REPORTED, "draft truncated, raw law reported"),
    "accept-noise-in-residual": (_REJECTING_NOISE, _USED_NOISE, "acceptance noise reused in the residual"),
    "draft-noise-in-residual": (_DRAFTING_NOISE, _USED_NOISE, "draft noise reused in the residual"),
    "draft-noise-in-accept": (_ACCEPTED_BY_DRAFT, "draft noise reused in acceptance"),
    "ratio-inflated": (_INFLATED, _ACCEPTED_MORE),
    "typical-acceptance": (_TYPICAL,),
    "threshold-acceptance": (_THRESHOLD, _ACCEPTED_MORE),
    "accept-or-equal": (),
}
"""Structured faults, and what a verdict may call each: the line of code that is wrong, or the fault itself.

The last one shows once in 2^53 draws, so in no stream; it is here to say so."""

_BY_THRESHOLD = Fault(
    name="threshold-acceptance",
    stands_for="drafts are accepted from a target probability of 0.1 on, whatever the draft's",
    caught_by=("exactness", "lossless"),
    apply=rule(replace(LOSSY["threshold"], accepts=partial(above_threshold, least=0.1))),
)


def known_faults(names: Sequence[str] = ()) -> tuple[Fault, ...]:
    """The structured faults of these names, or all. Raises `PlanError` for another."""
    by_name = {fault.name: fault for fault in (*FAULTS, _BY_THRESHOLD) if fault.name in NAMES}
    for name in names:
        if name not in by_name:
            msg = f"'{name}' is none of the structured faults: {', '.join(NAMES)}"
            raise PlanError(msg)
    return tuple(by_name[name] for name in names or NAMES)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the e-process made of one stream."""

    num_tokens: int
    """Decoded."""
    proof_at: int | None
    """Tokens after which it was proof."""
    log10_e: float
    """At the end."""
    likeliest: str
    """At the end of the round in which proof came, when a certificate is written."""
    rivals: tuple[str, ...]
    """What was not told apart from it then."""
    named_right: bool
    named_among: bool
    """Whether the fault is the likeliest, or one of its rivals: the name that was given is not a wrong one."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """One fault, or the healthy decoder (no name)."""

    fault: str
    tv: float
    """Mean TV distance of an emitted token's law from the target's, exact at each context."""
    runs: tuple[Run, ...]
    fixed: Mapping[str, int | None]
    """Tokens at which each test of a fixed number rejects; None where it doesn't within the budget."""
    failed: Mapping[str, bool]
    """Whether each criterion in use fails, with the whole budget."""
    acceptance_length: float
    """Of the first stream; the healthy decoder's is what a criterion holds the others against."""

    @property
    def median(self) -> float:
        """Tokens to proof in the median run; infinite where most runs have none."""
        return float(np.median([math.inf if run.proof_at is None else run.proof_at for run in self.runs]))

    @property
    def slowest(self) -> float:
        """Tokens to proof in the slowest run."""
        return max((math.inf if run.proof_at is None else float(run.proof_at) for run in self.runs), default=math.inf)

    @property
    def num_named_right(self) -> int:
        """Runs whose likeliest component is the fault."""
        return sum(run.named_right for run in self.runs)

    @property
    def num_alone(self) -> int:
        """Of these, the runs in which nothing else is nearly as likely."""
        return sum(run.named_right and not run.rivals for run in self.runs)

    @property
    def num_misled(self) -> int:
        """Runs with proof whose certificate doesn't list the fault at all."""
        return sum(run.proof_at is not None and not run.named_among for run in self.runs)

    @property
    def named(self) -> str:
        """The likeliest component of most runs."""
        return Counter(run.likeliest for run in self.runs).most_common(1)[0][0]


@dataclass(frozen=True, kw_only=True)
class Detections:
    """What a measurement has so far."""

    key: str
    """Of the measurement; another's faults are never taken over."""
    found: tuple[Detection, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """Everything that the tests of a fixed number of tokens look at."""

    stream: ScoredTraces
    alone: Sequence[DecodeTrace]
    """Target-only texts after the same prompts, round by round."""
    first: NDArray[np.int64]
    """The token after one prompt, many times, drafted and verified."""
    first_alone: NDArray[np.int64]
    law: NDArray[np.float64]
    greedy: tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
    acceptance_length: float
    baseline: float


def _pit(test: Callable[[NDArray[np.float64]], float]) -> Callable[[_Seen, int], bool]:
    """A test of PIT values, in each of the three orders."""
    return lambda seen, n: any(test(seen.stream[order][:n]) <= _RATE / len(ORDERS) for order in ORDERS)


def _mmd_rejects(seen: _Seen, num_tokens: int) -> bool:
    """Between as many texts of each arm as hold so many tokens."""
    ends = np.cumsum([len(trace.token_ids) for trace in seen.stream.traces])
    number = min(int(np.searchsorted(ends, num_tokens)) + 1, len(seen.alone))
    both = [*seen.stream.traces[:number], *seen.alone[:number]]
    outcome = mmd(
        bigram_gram([trace.token_ids for trace in both]),
        np.arange(len(both)) >= number,
        np.array([trace.request.prompt_id for trace in both]),
    )
    return outcome.p_value <= _MMD_RATE


FIXED_TESTS: dict[str, Callable[[_Seen, int], bool]] = {
    "KS of the PIT": _pit(lambda values: kolmogorov_smirnov(values).p_value),
    "chi-square of the PIT": _pit(lambda values: chi_square_uniform(values).p_value),
    "chi-square of one context": lambda seen, n: (
        chi_square(np.bincount(seen.first[:n], minlength=len(seen.law)), seen.law).p_value <= _RATE
    ),
    "MMD of bigrams": _mmd_rejects,
}
"""Whether the first n tokens are rejected: at 1e-6 (MMD at 1e-3)."""

CRITERIA: dict[str, Callable[[_Seen], bool]] = {
    "distance ratio (vLLM)": lambda seen: criteria.distance_ratio(seen.first, seen.law),
    "KL difference (TensorRT-LLM)": lambda seen: criteria.close_kl(seen.first, seen.first_alone, seen.law),
    "TV below 0.2 (FlashInfer-Bench)": lambda seen: criteria.close_tv(seen.first, seen.law),
    "histogram within 0.01": lambda seen: criteria.within_tolerance(seen.first, seen.law),
    "greedy texts equal": lambda seen: criteria.same_texts(*seen.greedy, least=1.0),
    "60 % of greedy texts equal (vLLM)": lambda seen: criteria.same_texts(*seen.greedy, least=0.6),
    "acceptance length within 2 % (vLLM)": lambda seen: criteria.close_acceptance_length(
        seen.acceptance_length, seen.baseline
    ),
    "acceptance length above a floor (SGLang)": lambda seen: criteria.enough_acceptance_length(
        seen.acceptance_length, seen.baseline
    ),
}
"""Whether each passes."""


def detections(
    subject: Subject,
    plan: Plan,
    faults: Sequence[Fault],
    *,
    tokens: int,
    compared: int,
    runs: int,
    finished: Sequence[Detection] = (),
    watch: Watch | None = None,
) -> Iterator[Detection]:
    """The healthy decoder, then each fault; every one as it is done. Those that are `finished` are not looked at again.

    `tokens` is the budget of the e-process, `compared` that of every other test, and of what no stream shows. Raises
    `PlanError` where the subject isn't a reference decoder with a draft model.
    """
    if subject.decoder is None or subject.draft is None:
        msg = "faults are planted in the reference decoder with a draft model; leave out --drafter"
        raise PlanError(msg)
    watch = Silent() if watch is None else watch
    watch.stage("faults", len(faults) + 1)
    alone = _alone(subject, plan, compared)
    first_alone = _first_tokens(subject, plan, compared, speculation=False)
    greedy_alone = _greedy(subject, plan, speculation=False)
    baseline = math.nan
    done = {one.fault: one for one in finished}
    for fault in (None, *faults):
        name = "" if fault is None else fault.name
        if name in done:
            baseline = done[name].acceptance_length if fault is None else baseline
            yield done[name]
            watch.advance()
            continue
        asked_of = subject if fault is None else fault.plant(subject)
        in_vain = fault is None or not NAMES[fault.name]
        most = compared if in_vain else max(tokens, compared)
        stream = _stream(asked_of, plan, run=0, least=compared, most=most)
        length = count(stream.traces).mean_acceptance_length
        baseline = length if fault is None else baseline
        seen = _Seen(
            stream, alone, _first_tokens(asked_of, plan, compared), first_alone, _first_law(subject, plan),
            (_greedy(asked_of, plan), greedy_alone), length, baseline,
        )  # fmt: skip
        others = [_stream(asked_of, plan, run=run, least=0, most=most) for run in range(1, runs)]
        yield Detection(
            fault=name,
            tv=_tv(asked_of, stream, name),
            runs=tuple(_run(each, name) for each in (stream, *others)),
            fixed={test: _first_rejection(rejects, seen, compared) for test, rejects in FIXED_TESTS.items()},
            failed={criterion: not passes(seen) for criterion, passes in CRITERIA.items()},
            acceptance_length=length,
        )
        watch.advance()
    watch.close()


def _first_rejection(rejects: Callable[[_Seen, int], bool], seen: _Seen, tokens: int) -> int | None:
    return next((n for n in (*(n for n in _GRID if n < tokens), tokens) if rejects(seen, n)), None)


def _run(stream: ScoredTraces, fault: str) -> Run:
    process = e_process(stream)
    crossing = process.first_crossing(PROOF)
    seen = process if crossing is None else e_process(stream.where(_rounds(stream) <= _rounds(stream)[crossing]))
    names = set(NAMES.get(fault, ())) if crossing is not None else set()
    return Run(
        num_tokens=len(stream),
        proof_at=None if crossing is None else crossing + 1,
        log10_e=process.log10_e,
        likeliest=seen.likeliest,
        rivals=seen.rivals,
        named_right=seen.likeliest in names,
        named_among=bool(names & {seen.likeliest, *seen.rivals}),
    )


def _rounds(stream: ScoredTraces) -> NDArray[np.int64]:
    """The number of the round of each token: `detection/RUN/ROUND/PROMPT`."""
    numbers = np.array([int(trace.request.id.split("/")[2]) for trace in stream.traces], dtype=np.int64)
    return numbers[stream["trace"].astype(np.int64)]


def _stream(subject: Subject, plan: Plan, *, run: int, least: int, most: int) -> ScoredTraces:
    """Text after the prompts, some of them a round: at least so many tokens, and then until there is proof."""
    scored, number = ScoredTraces(), 0
    while len(scored) < least or (len(scored) < most and not _proved(scored)):
        traces = list(subject.engine.decode(_round(subject, plan, f"detection/{run}", number)))
        scored = scored.merge(
            score(traces, target=subject.target, draft=subject.draft, stages=True, workers=subject.workers)
        )
        number += 1
    return scored.where(np.arange(len(scored)) < most)


def _proved(scored: ScoredTraces) -> bool:
    return len(scored) > 0 and e_process(scored).first_crossing(PROOF) is not None


def _round(subject: Subject, plan: Plan, purpose: str, number: int, *, speculation: bool = True) -> Round:
    """Requests of a few prompts, the next ones in each round; every prompt has come up before one comes up again."""
    prompts = subject.prompts
    chosen = [
        prompts[(number * _ROUND_PROMPTS + place) % len(prompts)] for place in range(min(_ROUND_PROMPTS, len(prompts)))
    ]
    params = replace(sampling(subject, plan), max_new_tokens=_ROUND_TOKENS)
    return asked(f"{purpose}/{number}", plan, chosen, params, speculation=speculation)


def _alone(subject: Subject, plan: Plan, tokens: int) -> list[DecodeTrace]:
    """Target-only texts of the budget, after the same prompts as a stream."""
    traces: list[DecodeTrace] = []
    number = 0
    while sum(len(trace.token_ids) for trace in traces) < tokens:
        traces += subject.engine.decode(_round(subject, plan, "detection/alone", number, speculation=False))
        number += 1
    return traces


def _first_tokens(subject: Subject, plan: Plan, tokens: int, *, speculation: bool = True) -> NDArray[np.int64]:
    """The first token after one prompt, as many times as the budget has tokens."""
    params = replace(
        sampling(subject, plan), max_new_tokens=2 if speculation else 1
    )  # two, so that the first is drafted
    [prompt] = subject.prompts[:1]
    requests = asked("detection/first", plan, [prompt], params, num_samples=tokens, speculation=speculation)
    return np.array([trace.token_ids[0] for trace in subject.engine.decode(requests)])


def _first_law(subject: Subject, plan: Plan) -> NDArray[np.float64]:
    return law_after(subject, subject.prompts[0], sampling(subject, plan))


def _greedy(subject: Subject, plan: Plan, *, speculation: bool = True) -> list[tuple[int, ...]]:
    prompts = spread(subject.prompts, _GREEDY_PROMPTS)
    params = sampling(subject, replace(plan, max_new_tokens=_ROUND_TOKENS), SamplingParams(temperature=0))
    requests = asked("detection/greedy", plan, prompts, params, speculation=speculation)
    return [trace.token_ids for trace in subject.engine.decode(requests)]


def _tv(subject: Subject, stream: ScoredTraces, fault: str) -> float:
    """At contexts of the fault's own text."""
    assert subject.decoder is not None
    assert subject.draft is not None
    rng = np.random.default_rng(derived_seed(0, "contexts"))
    contexts = []
    for trace in spread(tuple(trace for trace in stream.traces if trace.token_ids), _CONTEXTS):
        kept = int(rng.integers(len(trace.token_ids)))
        contexts.append(trace.request.prompt_ids + trace.token_ids[:kept])
    share = float((stream["role"] == Role.BONUS).mean()) if len(stream["role"]) else 0.0
    return step_distance(subject.decoder, subject.draft, contexts, fault=fault).per_token(share)
