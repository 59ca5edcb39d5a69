"""Evidence of a sampled stream against "every token follows the target's law", shared by the sampled checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specverify.records import Finding, Plot, PlotKind, Series, StatisticalTest
from specverify.statistics.sequential import EProcess, histogram_bets, likelihood_ratio_bets, mix
from specverify.statistics.uniformity import (
    chi_square_uniform,
    kolmogorov_smirnov,
    smallest_detectable_kolmogorov,
    smallest_detectable_uniform_tv,
)

if TYPE_CHECKING:
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces

__all__ = ["ORDERS", "e_process", "e_process_test", "empty_texts", "impossible_tokens", "pit_tests"]

ORDERS: dict[str, str] = {
    "pit_ratio": "draft/target ratio",
    "pit_prob": "target probability",
    "pit_id": "token id",
}
"""Columns of PIT values, and the order of the vocabulary behind each; the first exists only where the draft is known."""


def impossible_tokens(scored: ScoredTraces) -> tuple[Finding, ...]:
    """Tokens to which the target, under the request's own parameters, gives probability 0: no statistics needed."""
    findings = []
    for index in np.flatnonzero(scored["prob"] == 0)[:5]:
        trace = scored.traces[int(scored["trace"][index])]
        findings.append(
            Finding(
                text=f"token {int(scored['token'][index])} was emitted, but has probability 0 under the target",
                place=f"{trace.request.id}, sample {trace.sample}, token {int(scored['position'][index])}",
            )
        )
    return tuple(findings)


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
    bets = {name: likelihood_ratio_bets(ratio) for name, ratio in scored.fault_ratios.items()}
    bets |= {f"uneven in the order of {ORDERS[order]}": histogram_bets(scored[order]) for order in _known(scored)}
    return mix(bets)


def e_process_test(scored: ScoredTraces, *, name: str) -> StatisticalTest:
    """The e-process as a test; its name says which fault the evidence is for, if there is much."""
    process = e_process(scored)
    suspected = f", likeliest: {process.likeliest}" if process.log10_e >= 3 else ""
    return StatisticalTest(
        name=f"{name} e-process{suspected}",
        statistic=process.log10_e,
        log10_e=process.log10_e,
        allowed=float("nan"),
        failed=False,
        num_samples=len(scored),
    )


def pit_tests(scored: ScoredTraces, plan: Plan, *, name: str, chi_square: bool = True) -> tuple[StatisticalTest, ...]:
    """KS, and chi-square over 16 cells, of the PIT values in each order."""
    tests = []
    rate = plan.false_fail_rate / 2
    for order in _known(scored):
        ks = kolmogorov_smirnov(scored[order])
        detectable = smallest_detectable_kolmogorov(
            len(scored), false_fail_rate=rate, false_pass_rate=plan.false_pass_rate
        )
        label = f"{name} KS, order of {ORDERS[order]}"
        tests.append(_test(label, ks.statistic, ks.p_value, len(scored), detectable, "Kolmogorov distance"))
        if chi_square:
            chi = chi_square_uniform(scored[order])
            tv = smallest_detectable_uniform_tv(len(scored), false_fail_rate=rate, false_pass_rate=plan.false_pass_rate)
            tests.append(
                _test(f"{name} chi-square, order of {ORDERS[order]}", chi.statistic, chi.p_value, len(scored), tv)
            )
    return tuple(tests)


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
    return [order for order in ORDERS if len(scored[order])]


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
            Series(label="fails from here", x=(0.0, float(len(path))), y=(limit, limit), dashed=True),
        ),
        caption="Falling or flat: no evidence against the target. Rising to the dashed line: proof, at the run's error rate.",
    )
