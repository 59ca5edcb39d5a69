"""A whole engine of which only texts are known: no log-probability can be had, of the target or from the engine.

Note [Texts alone]: what is left is the engine without speculation, asked as often as one likes. Sampled texts with speculation
are held against those without, by the MMD (Note [Learned score] in `statistics.two_sample`) and by what the draft thinks of them,
where it can be loaded; two controls of `checks.two_arms` say whether the answer is worth anything. At temperature 0 a token
that differs is either a near tie, which rounding may turn, or wrong, and the engine's own samples after the same prefix tell:
of two ids whose logits are at most d apart, the lesser one is drawn at temperature 1 with a share of at least 1 / (1 + e^d).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from scipy import special, stats

from specverify.checks.check import asked, sampling, spread
from specverify.checks.evidence import EXTENSION, least_level, proof, settled
from specverify.checks.noise import MOST_OF_ENGINE
from specverify.checks.two_arms import (
    ARMS,
    COLDER,
    arms_measurements,
    arms_tests,
    arms_verdict,
    compare_arms,
    controls,
    pairs_of,
)
from specverify.conformance.asking import Asking, Seen, cell, if_drafted
from specverify.conformance.cells import certificate_of, held
from specverify.conformance.laws import on_subject, require_off
from specverify.conformance.told import drafting, vocabulary
from specverify.records import Finding, SamplingParams, StatisticalTest, Verdict
from specverify.scoring import ScoredTraces, score
from specverify.statistics.interval import zero_failures_bound
from specverify.statistics.sequential import mix
from specverify.statistics.two_sample import bigrams, sign_bets, witness_differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float

    from specverify.conformance.laws import Laws
    from specverify.engines import Engine
    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.records import Certificate, DecodeTrace
    from specverify.statistics.sequential import EProcess
    from specverify.watch import Watch

__all__ = ["certify_by_texts"]

_CLAIM_OF_GREEDY = "at temperature 0, texts with speculation are those without, but for near ties"
_CLAIM_OF_TEXTS = "sampled texts with and without speculation follow one law"

_EFFECT = f"of the change that {COLDER} of the temperature makes"
_ALLOWED_GAP = 2 * MOST_OF_ENGINE
"""Logits: what an engine's noise may turn, at most."""
_LEAST_SHARE = 1 / (1 + math.exp(_ALLOWED_GAP))
"""Of the lesser of two ids no further apart."""
_LOOKS = 400
"""Samples of the token at a place where greedy texts differ."""
_MOST_PLACES = 8
"""Such places that are looked at."""


# --------------------------------------------------------------------------------------------------------- the texts


@dataclass(frozen=True)
class _Arm:
    """Texts, and what the draft thinks of them, where it is loaded."""

    texts: list[DecodeTrace]
    read: ScoredTraces | None

    def __add__(self, other: _Arm) -> _Arm:
        """With more of them."""
        read = self.read.merge(other.read) if self.read is not None and other.read is not None else None
        return _Arm(self.texts + other.texts, read)


def _compared(first: _Arm, second: _Arm) -> EProcess:
    """Evidence that the texts of two arms don't follow one law, without a log-probability of either."""
    pairs = [
        (first.texts[ours], second.texts[theirs]) for ours, theirs in pairs_of(first.texts, second.texts).T.tolist()
    ]

    def witness(*, by_prompt: bool) -> Float[np.ndarray, " pairs"]:
        features = [
            tuple(bigrams(one.token_ids, prompt=one.request.prompt_id if by_prompt else "") for one in pair)
            for pair in pairs
        ]
        return witness_differences([ours for ours, _ in features], [theirs for _, theirs in features])

    lengths = np.array([len(ours.token_ids) - len(theirs.token_ids) for ours, theirs in pairs], dtype=np.float64)
    paths = {
        "MMD of neighbouring ids": sign_bets(witness(by_prompt=False)),
        "MMD of neighbouring ids after one prompt": sign_bets(witness(by_prompt=True)),
        "tokens in a text": sign_bets(lengths),
    }
    if first.read is not None and second.read is not None:
        paths["what the draft thinks of a text"] = compare_arms(first.read, second.read).path
    return mix(paths)


def _look_at_texts(draft: LanguageModel | None, asking: Asking) -> Seen:
    plan, subject = asking.plan, asking.subject
    params = sampling(subject, plan)
    samples = max(2, -(-plan.lossless_tokens // (plan.max_new_tokens * max(1, len(subject.prompts)))))

    def arm(name: str, number: int = 0, *, speculation: bool, temperature: float = params.temperature) -> _Arm:
        asks = replace(params, temperature=temperature)
        requests = asked(
            f"lossless/{name}/{number}", plan, subject.prompts, asks, num_samples=samples, speculation=speculation
        )
        texts = [replace(one, request=replace(one.request, params=params)) for one in asking.answers(requests)]
        return _Arm(texts, score(texts, target=draft) if draft is not None else None)

    on, off, again = (arm(name, speculation=name == "on") for name in ARMS)
    if not all(any(text.token_ids for text in each.texts) for each in (on, off, again)):
        return Seen(summary="an arm answered without a token", verdict=Verdict.INCONCLUSIVE)
    colder = arm(
        "lossy", speculation=True, temperature=COLDER * params.temperature
    )  # read as if it were like the others
    compared, control, lossy = _compared(on, off), _compared(off, again), _compared(colder, off)
    for number in range(1, EXTENSION):
        if settled(compared.log10_e, plan):
            break
        on += arm("on", number, speculation=True)
        off += arm("off", number, speculation=False)
        compared = _compared(on, off)
    verdict, summary = arms_verdict(plan, on.texts, compared, control, lossy, budget="lossless_tokens")
    smallest = _smallest_detectable(lossy, plan)
    return Seen(
        summary=summary,
        notes=controls(control, lossy),
        tests=arms_tests(compared, control, of="differences of texts", detectable=smallest, unit=_EFFECT),
        num_samples=len(compared.path),
        sample_unit="pairs of texts",
        smallest_detectable=smallest,
        effect_unit=_EFFECT,
        advice="compare speculation on and off where log-probabilities can be had: by texts alone nobody can say which line is wrong",
        verdict=verdict,
        measurements=arms_measurements(compared, control, lossy),
    )


def _smallest_detectable(lossy: EProcess, plan: Plan) -> float:
    """By how the lossy arm showed; the root that promises less is taken.

    log e grows with the square of a change for a score that is given, and with its fourth power for one that must be learned.
    """
    if lossy.log10_max <= 0:
        return math.inf
    ratio = proof(plan) / lossy.log10_max
    return max(math.sqrt(ratio), math.sqrt(math.sqrt(ratio)))


# ------------------------------------------------------------------------------------------------------------- greedy


@dataclass(frozen=True)
class _Place:
    """Where two greedy texts of one prompt first differ."""

    trace: DecodeTrace
    """With speculation."""
    position: int
    ids: tuple[int | None, int | None]
    """With speculation and without; None where the text is over."""

    @property
    def ended(self) -> bool:
        return None in self.ids


def _first_difference(on: DecodeTrace, off: DecodeTrace) -> _Place | None:
    both = enumerate(zip_longest(on.token_ids, off.token_ids))
    return next((_Place(on, at, ids) for at, ids in both if ids[0] != ids[1]), None)


def _look_at_greedy(asking: Asking) -> Seen:
    plan, subject = asking.plan, asking.subject
    params = SamplingParams(temperature=0, max_new_tokens=plan.max_new_tokens, eos_token_ids=subject.eos_token_ids)
    prompts = spread(subject.prompts, plan.greedy_prompts)
    on, off = (
        asking.answers(asked(f"greedy/{arm}", plan, prompts, params, speculation=arm == "on")) for arm in ("on", "off")
    )
    places = [place for place in map(_first_difference, on, off) if place is not None]
    tokens = sum(len(trace.token_ids) for trace in on)
    summary = f"{len(places)} of {len(on)} texts ({tokens:,} tokens) differ from those without speculation"
    if not places:
        same = Seen(
            summary=summary,
            num_samples=len(on),
            sample_unit="texts",
            smallest_detectable=zero_failures_bound(len(on), plan.false_pass_rate),
            effect_unit="share of texts",
            verdict=Verdict.PASS if tokens else Verdict.INCONCLUSIVE,
        )
        return if_drafted(same, on)
    ended = [
        Finding(text=f"the text is over after {place.position} tokens in one arm and goes on in the other", place=place.trace.request.id)
        for place in places if place.ended
    ]  # fmt: skip
    looked = [place for place in places if not place.ended][:_MOST_PLACES]
    drawn = [_drawn(asking, place) for place in looked]
    smallest = [_smallest_gap(total, plan, num_places=len(drawn)) for _, total in drawn]
    num_known = sum(map(math.isfinite, smallest))
    notes = tuple(
        Finding(
            text=f"token {place.position} is {place.ids[0]}, and {place.ids[1]} without speculation, which draws them {lesser} "
            f"and {total - lesser} times in {_LOOKS} at temperature 1",
            severity=Verdict.PASS,
            place=f"{place.trace.request.id}, prompt {list(place.trace.request.prompt_ids)[:40]}",
        )
        for place, (lesser, total) in zip(looked, drawn, strict=True)
    )
    enough = num_known == len(places) - len(ended)
    detectable = max(smallest, default=math.nan)
    seen = Seen(
        summary=f"{summary}; "
        + (
            f"each could be a near tie, of ids at most {_ALLOWED_GAP:g} logits apart"
            if enough
            else f"whether they are near ties could be told for {num_known} of them alone"
        ),
        wrong=tuple(ended),
        notes=notes,
        tests=(_near_ties(drawn, detectable),) if drawn else (),
        num_samples=len(on),
        sample_unit="texts",
        smallest_detectable=detectable if drawn else None,
        effect_unit="logits",
        advice="compare what the engine verifies at temperature 0 with its own first choices",
        verdict=Verdict.PASS if enough else Verdict.INCONCLUSIVE,
    )
    return if_drafted(seen, on)


def _drawn(asking: Asking, place: _Place) -> tuple[int, int]:
    """How often the engine without speculation draws the first of the two ids there, and how often one of them."""
    request = replace(
        asking.request(
            (*place.trace.request.prompt_ids, *place.trace.token_ids[: place.position]),
            SamplingParams(max_new_tokens=1, eos_token_ids=asking.subject.eos_token_ids),
            name=f"{place.trace.request.id}/{place.position}",
            num_samples=_LOOKS,
        ),
        speculation=False,
    )
    first = [trace.token_ids[0] for trace in asking.answers([request]) if trace.token_ids]
    ours, theirs = (sum(token == each for token in first) for each in place.ids)
    return ours, ours + theirs


def _smallest_gap(total: int, plan: Plan, *, num_places: int) -> float:
    """Logits between two ids from which `total` draws of either reliably show that they are no near tie; infinite where none do."""
    level = least_level(plan) / num_places
    if stats.binom.cdf(0, total, _LEAST_SHARE) > level:
        return math.inf
    most = int(stats.binom.ppf(level, total, _LEAST_SHARE))  # the first number that may not be rejected any more
    rejected = most if stats.binom.cdf(most, total, _LEAST_SHARE) <= level else most - 1
    share = float(special.betaincinv(rejected + 1, total - rejected, plan.false_pass_rate))
    return math.log((1 - share) / share)


def _near_ties(drawn: Sequence[tuple[int, int]], detectable: float) -> StatisticalTest:
    """Exact and one-sided at each place, Bonferroni's over them."""
    worst = min(float(stats.binom.cdf(lesser, total, _LEAST_SHARE)) for lesser, total in drawn)
    return StatisticalTest(
        name=f"tokens that differ are near ties, smallest of {len(drawn)}",
        statistic=min(lesser / max(1, total) for lesser, total in drawn),
        p_value=min(1.0, worst * len(drawn)),
        allowed=math.nan,
        failed=False,
        num_samples=sum(total for _, total in drawn),
        smallest_detectable=detectable,
        effect_unit="logits",
    )


# ---------------------------------------------------------------------------------------------------------------- run


def certify_by_texts(
    engine: Engine,
    off: Engine | None,
    laws: Laws,
    plan: Plan,
    *,
    watch: Watch | None = None,
    command: str = "specverify certify",
) -> Certificate:
    """Hold texts with speculation against those without; `laws.target` may be absent, and any sampling parameters may be asked.

    Raises `PlanError` for an engine that can't be asked without speculation.
    """
    started = time.perf_counter()
    off = require_off(off, scorer="texts")
    cells = (
        drafting,
        vocabulary,
        cell("greedy", _CLAIM_OF_GREEDY, _look_at_greedy),
        cell("lossless", _CLAIM_OF_TEXTS, partial(_look_at_texts, _reader(laws))),
    )
    subject = on_subject(engine, off, replace(laws, draft=None), command=command)
    results = [held(each, subject, plan, watch) for each in cells if not plan.only or each.id in plan.only]
    return certificate_of(results, engine.name, laws, plan, command=command, started=started)


def _reader(laws: Laws) -> LanguageModel | None:
    """The draft, if it is loaded and knows all ids."""
    return laws.draft if laws.draft is not None and laws.draft.vocab_size >= laws.target.vocab_size else None
