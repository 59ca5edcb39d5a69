"""Evidence of a sampled stream against "every token follows the target's law", shared by the sampled checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.noise import measured_noise
from specverify.records import Finding, Plot, PlotKind, Series, StatisticalTest, Verdict
from specverify.stages import Role
from specverify.statistics.budget import MOST_E_PROCESSES, e_threshold, most_p_values
from specverify.statistics.interval import mixture_share_bound
from specverify.statistics.sequential import (
    EProcess,
    bernoulli_bets,
    histogram_bets,
    likelihood_ratio_bets,
    mix,
    smallest_detectable_kl,
)
from specverify.statistics.uniformity import (
    chi_square_uniform,
    kolmogorov_distance_bound,
    kolmogorov_smirnov,
    samples_needed_kolmogorov,
    smallest_detectable_kolmogorov,
    smallest_detectable_uniform_tv,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from specverify.plan import Plan
    from specverify.records import CheckResult
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = [
    "EXTENSION",
    "ORDERS",
    "STAGES",
    "Support",
    "detectable_growth",
    "detectable_shift",
    "e_process",
    "e_process_test",
    "empty_texts",
    "impossible",
    "in_doubt",
    "least_level",
    "pit_tests",
    "positive_statements",
    "proof",
    "settled",
    "support",
    "suspicious",
    "tokens_needed",
    "told_suspicion",
]

_SUSPICION = 3.0
"""log10 of the e-value at which what is not proved wrong is asked more of by itself."""
EXTENSION = 10
"""Times as much, at most."""

ORDERS: dict[str, str] = {
    "pit_ratio": "draft/target ratio",
    "pit_prob": "target probability",
    "pit_id": "token id",
}
"""Columns of PIT values, and the order of the vocabulary behind each; the first exists only where the draft is known."""

STAGES: dict[str, str] = {
    "pit_draft": "drafts not drawn from the reported draft law",
    "pit_residual": "replacement of a rejected draft not drawn from [p - q]+ of its row",
    "pit_residual_id": "replacement of a rejected draft drawn with noise that was used before",
    "pit_bonus": "bonus token not drawn from the target's row",
}
"""PIT columns of the stages of chain rejection, and what is wrong where one is uneven."""

_ROUNDING = 1e-6
"""How far an acceptance probability may be off because the scorer runs the models in another batch shape."""


_PROOF = 4.0
"""Logits outside the support that no rounding explains, in any dtype."""
_RIVALS_SHOWN = 3
_MOST_AT_THE_EDGE = 0.02
"""Share of tokens at the edge of the support, within the measured noise, beyond which the support was not tested."""


@dataclass(frozen=True)
class Support:
    """Tokens that the target, under the request's own parameters, gives probability 0."""

    findings: tuple[Finding, ...]
    """Those that measured noise doesn't explain: proof, no statistics needed."""
    inside: ScoredTraces
    """The tokens to which statistics apply."""
    share_at_edge: float
    """Of all tokens: outside by less than the noise of top-k, top-p and min-p's thresholds."""

    @property
    def settled(self) -> bool:
        """Whether few enough lie at the edge."""
        return self.share_at_edge <= _MOST_AT_THE_EDGE


def impossible(scored: ScoredTraces) -> bool:
    """Whether a token lies so far outside the support that nothing more need be asked."""
    return bool((scored["edge"] > _PROOF).any())


def support(subject: Subject, plan: Plan, scored: ScoredTraces) -> Support:
    """Hold tokens outside the support against the noise that the target's logits really have on this machine."""
    outside = scored["edge"] > 0
    if not outside.any():
        return Support((), scored, 0.0)
    traces = {int(index) for index in scored["trace"][outside]}
    texts = [scored.traces[index].request.prompt_ids + scored.traces[index].token_ids for index in sorted(traces)]
    noise = measured_noise(
        subject.target, texts, chunk=plan.num_speculative_tokens + 1, engine_noise=subject.engine_noise
    )
    proof = scored["edge"] > min(noise.allowed_gap, _PROOF)
    findings = []
    for index in np.flatnonzero(proof)[:5]:
        trace = scored.traces[int(scored["trace"][index])]
        findings.append(
            Finding(
                text=f"token {int(scored['token'][index])} was emitted, but has probability 0 under the target",
                place=f"{trace.request.id}, sample {trace.sample}, token {int(scored['position'][index])}",
            )
        )
    share = float((outside & ~proof).mean())
    if share:
        text = (
            f"{int((outside & ~proof).sum())} tokens lie at the edge of the support, within the measured noise "
            f"(2B = {noise.allowed_gap:.2g} logits)"
        )
        findings.append(Finding(text=text, severity=Verdict.PASS))
    return Support(tuple(findings), scored.where(~outside), share)


def empty_texts(scored: ScoredTraces) -> tuple[Finding, ...]:
    """Texts without a token: every text has one, if only its EOS, and leaving it out changes the law of the others."""
    return tuple(
        Finding(
            text="a text without a token: not even the EOS that ended it was handed out",
            place=f"{trace.request.id}, sample {trace.sample}",
        )
        for trace in scored.traces
        if not trace.token_ids
    )[:5]


def e_process(scored: ScoredTraces) -> EProcess:
    """Bets on every known fault and on any unevenness of the PIT in each order, mixed evenly; valid at any time."""
    bets: dict[str, Callable[[], Float[np.ndarray, " n"]]] = {
        name: partial(_likelihood_bets, scored, name) for name in scored.fault_ratios
    }
    for order in _known(scored):
        bets[f"uneven in the order of {ORDERS[order]}"] = partial(_order_bets, scored, order)
    return mix(_OneAtATime(bets | _stage_bets(scored)))


class _OneAtATime(Mapping[str, "Float[np.ndarray, ' n']"]):
    """Paths that are computed when they are read, so that a long run doesn't hold forty of them."""

    def __init__(self, made: dict[str, Callable[[], Float[np.ndarray, " n"]]]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> Float[np.ndarray, " n"]:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _likelihood_bets(scored: ScoredTraces, name: str) -> Float[np.ndarray, " n"]:
    return likelihood_ratio_bets(scored.fault_ratios[name])


def _order_bets(scored: ScoredTraces, order: str) -> Float[np.ndarray, " n"]:
    return histogram_bets(scored[order])


def _stage_bets(scored: ScoredTraces) -> dict[str, Callable[[], Float[np.ndarray, " n"]]]:
    """Bets on each stage of chain rejection; a path stands still at the tokens that its stage doesn't concern."""
    bets: dict[str, Callable[[], Float[np.ndarray, " n"]]] = {}
    for column, name in STAGES.items():
        if not np.isnan(scored[column]).all():
            bets[name] = partial(_stage_path, scored, column)
    if not np.isnan(scored["accept_prob"]).all():
        bets["drafts accepted more often than min(1, p/q)"] = partial(_acceptance_path, scored, more=True)
        bets["drafts accepted less often than min(1, p/q)"] = partial(_acceptance_path, scored, more=False)
    return bets


def _stage_path(scored: ScoredTraces, column: str) -> Float[np.ndarray, " n"]:
    values = scored[column]
    concerned = ~np.isnan(values)
    return _spread_out(histogram_bets(values[concerned]), concerned)


def _acceptance_path(scored: ScoredTraces, *, more: bool) -> Float[np.ndarray, " n"]:
    """The scorer's own rounding must not turn a ratio of 1 into proof."""
    prob = scored["accept_prob"]
    drafted = ~np.isnan(prob)
    accepted, prob = scored["role"][drafted] == Role.ACCEPTED, prob[drafted]
    if more:
        return _spread_out(bernoulli_bets(accepted, prob.clip(_ROUNDING, 1)).above, drafted)
    return _spread_out(bernoulli_bets(accepted, prob.clip(0, 1 - _ROUNDING)).below, drafted)


def _spread_out(path: Float[np.ndarray, " some"], concerned: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    spread: Float[np.ndarray, " n"] = np.concatenate(([0.0], path))[np.cumsum(concerned)]
    return spread


def e_process_test(scored: ScoredTraces, plan: Plan, *, name: str) -> StatisticalTest:
    """The e-process as a test; its name says which fault the evidence is for, if there is much (Note [Naming])."""
    process = e_process(scored)
    suspected = f", likeliest: {process.likeliest}" if process.log10_e >= 3 else ""
    if suspected and process.rivals:
        suspected += f" (not told apart yet from: {'; '.join(process.rivals[:_RIVALS_SHOWN])})"
    return StatisticalTest(
        name=f"{name} e-process{suspected}",
        statistic=process.log10_e,
        log10_e=process.log10_e,
        allowed=float("nan"),
        failed=False,
        num_samples=len(scored),
        smallest_detectable=detectable_growth(len(scored), 3 * len(process.components), plan),  # each at three η
        effect_unit="nats a token",
    )


def detectable_growth(num_observations: int, num_bets: int, plan: Plan) -> float:
    """By how many nats an observation the right one of so many bets must grow to be reliably seen.

    It shares its capital with the other bets, and the error budget with the run's other e-processes. Where the law of the
    fault is bet on, that is the mean Kullback-Leibler divergence, which is at least twice the mean squared TV distance.
    """
    rate = plan.false_fail_rate / 2 / MOST_E_PROCESSES / num_bets
    return smallest_detectable_kl(num_observations, false_fail_rate=rate, false_pass_rate=plan.false_pass_rate)


def least_level(plan: Plan) -> float:
    """The level that Holm's procedure leaves to the smallest p-value of a run, whatever the run asks."""
    return plan.false_fail_rate / 2 / most_p_values(plan.first_token_prompts)


def proof(plan: Plan) -> float:
    """log10 of the e-value that fails a run, whatever the run asks; one that asks less fails from a lower one on."""
    return e_threshold(plan.false_fail_rate / 2, MOST_E_PROCESSES)


def suspicious(log10_e: float) -> bool:
    """Whether to go on to `EXTENSION` times as much: evidence that may be no proof, and is too much to be left."""
    return log10_e >= _SUSPICION


def in_doubt(result: CheckResult) -> bool:
    """Whether it failed, or has evidence that the judge may find to be proof: `FAIL` by tests is the judge's to say."""
    return result.verdict is Verdict.FAIL or any(suspicious(test.log10_e or 0.0) for test in result.tests)


def settled(log10_e: float, plan: Plan) -> bool:
    """Whether more would change nothing: proof, or no suspicion."""
    return log10_e >= proof(plan) or not suspicious(log10_e)


def told_suspicion(said: str, log10_e: float, plan: Plan, *, proven: str) -> str:
    """What was found, and that it is no proof where it may be none; `proven` stands behind the judge's own sentence."""
    return (
        proven if log10_e >= proof(plan) else f"suspect: {said}; it is proof from 10^{proof(plan):.1f} on at the latest"
    )


def detectable_shift(num_tokens: int, plan: Plan) -> float:
    """The smallest Kolmogorov distance of the mean PIT law from uniform that so many tokens reliably show.

    Mean over positions: deviations that cancel from context to context are seen by the e-process's bets, or not at all.
    """
    return smallest_detectable_kolmogorov(
        num_tokens, false_fail_rate=least_level(plan), false_pass_rate=plan.false_pass_rate
    )


def tokens_needed(shift: float, plan: Plan) -> int:
    """The fewest tokens at which `detectable_shift` is at most `shift`."""
    return samples_needed_kolmogorov(shift, false_fail_rate=least_level(plan), false_pass_rate=plan.false_pass_rate)


def pit_tests(scored: ScoredTraces, plan: Plan, *, name: str, chi_square: bool = True) -> tuple[StatisticalTest, ...]:
    """KS, and chi-square over 16 cells, of the PIT values in each order."""
    tests = []
    rate = least_level(plan)
    for order in _known(scored):
        ks = kolmogorov_smirnov(scored[order])
        detectable = detectable_shift(len(scored), plan)
        label = f"{name} KS, order of {ORDERS[order]}"
        tests.append(_test(label, ks.statistic, ks.p_value, len(scored), detectable, "Kolmogorov distance"))
        if chi_square:
            chi = chi_square_uniform(scored[order])
            tv = smallest_detectable_uniform_tv(len(scored), false_fail_rate=rate, false_pass_rate=plan.false_pass_rate)
            tests.append(
                _test(f"{name} chi-square, order of {ORDERS[order]}", chi.statistic, chi.p_value, len(scored), tv)
            )
    return tuple(tests)


def positive_statements(scored: ScoredTraces, plan: Plan) -> dict[str, float]:
    """What the stream bounds, each but for a chance of the plan's false-fail rate. Neither bounds a single position.

    `kolmogorov_distance_bound` (statement C): of the mean law of the PIT in the order of q/p from uniform; deviations
    that cancel across positions are not excluded. `draft_leak_bound` (D): the share of tokens that may have come from
    the draft's law instead of the target's.
    """
    if not len(scored["pit_ratio"]):
        return {}
    ks = kolmogorov_smirnov(scored["pit_ratio"])
    leak = mixture_share_bound(
        scored["preferred"], scored["preferred_prob"], 1 - scored["overlap"], false_pass_rate=plan.false_fail_rate
    )
    distance = kolmogorov_distance_bound(ks.statistic, ks.num_samples, false_pass_rate=plan.false_fail_rate)
    return {"kolmogorov_distance_bound": distance, "draft_leak_bound": leak}


def _test(
    name: str, statistic: float, p_value: float, num_samples: int, detectable: float, unit: str = "TV distance"
) -> StatisticalTest:
    return StatisticalTest(
        name=name,
        statistic=statistic,
        p_value=p_value,
        allowed=float("nan"),
        failed=False,
        num_samples=num_samples,
        smallest_detectable=detectable,
        effect_unit=unit,
    )


def _known(scored: ScoredTraces) -> list[str]:
    return [order for order in ORDERS if order in scored.columns and len(scored)]


def qq_plot(scored: ScoredTraces) -> Plot:
    """PIT quantiles against uniform ones, one line an order."""
    levels = np.linspace(0, 1, 101)
    series = [
        Series(label=f"order of {ORDERS[order]}", x=tuple(levels.tolist()),
               y=tuple(np.quantile(scored[order], levels).tolist()))
        for order in _known(scored)
    ]  # fmt: skip
    return Plot(
        id="lossless/qq",
        title="PIT values of the emitted tokens",
        x_label="uniform quantile",
        y_label="observed quantile",
        kind=PlotKind.LINE,
        series=(*series, Series(label="the target's law", x=(0.0, 1.0), y=(0.0, 1.0), dashed=True)),
        caption="Lines on the diagonal: the tokens follow the target. A bend shows where they don't.",
    )


def e_process_plot(scored: ScoredTraces, *, limit: float) -> Plot:
    """The evidence as tokens come in."""
    path = e_process(scored).path
    places = np.unique(np.linspace(0, max(len(path) - 1, 0), 300).astype(int)) if len(path) else np.empty(0, int)
    return Plot(
        id="lossless/e_process",
        title="Evidence against the target's law",
        x_label="tokens",
        y_label="log10 of the e-value",
        kind=PlotKind.LINE,
        series=(
            Series(label="e-process", x=tuple((places + 1.0).tolist()), y=tuple(path[places].tolist())),
            Series(label="fails from here at the latest", x=(0.0, float(len(path))), y=(limit, limit), dashed=True),
        ),
        caption="Falling or flat: no evidence against the target. Rising to the dashed line: proof, at the run's error rate.",
    )
