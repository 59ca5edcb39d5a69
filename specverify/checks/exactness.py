"""exactness: the decoder's own rule and loop, driven over every path on small tables, emit the target's law exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specverify.checks.check import Check, reproduce
from specverify.choices import Stream
from specverify.choices.scripted import Scripted
from specverify.drafting import TREES, drafter_for
from specverify.law import autoregressive_law, decoded_law, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, Verdict
from specverify.verification import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from specverify.decoding import Decoder
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["TOLERANCE", "exactness", "instances"]

TOLERANCE = 1e-12
"""TV distance by which float64 rounding may part two exact laws."""
_ROUNDING = 2.0**-53
"""Of float64: no two laws are told to be closer."""
_VOCAB, _DRAFTS, _TOKENS = 3, 2, 3
_BRANCHING = (2, 1)
"""Of a tree rule's drafts: siblings on the first level, and a level below them."""


def instances() -> Iterator[tuple[str, TableModel, TableModel]]:
    """Pairs of tables on which rules go wrong: random ones, zeros on either side, equal, nearly one-hot, disjoint."""
    for seed in range(6):
        yield f"random {seed}", _table(2 * seed), _table(2 * seed + 1)
    yield "zeros in both", _table(20, zeros=0.3), _table(21, zeros=0.3)
    yield "target equals draft", _table(22), _table(22)
    yield "nearly one-hot", _table(23, sharpness=8), _table(24, sharpness=8)
    yield "disjoint supports", _only(_table(25), {0, 1}), _only(_table(26), {2})


def _table(seed: int, *, zeros: float = 0.0, sharpness: float = 1.5) -> TableModel:
    return random_table(_VOCAB, _TOKENS + 1, seed=seed, zeros=zeros, sharpness=sharpness)


def _only(table: TableModel, ids: set[int]) -> TableModel:
    """The table with all probability on `ids`."""
    dropped = torch.tensor([token not in ids for token in range(table.vocab_size)])
    levels = tuple(rows.masked_fill(dropped, -torch.inf).log_softmax(-1) for rows in table.levels)
    return replace(table, levels=levels)


def _accepts_the_impossible(decoder: Decoder) -> bool:
    """Whether a draft of target probability 0 passes when the uniform is exactly 0."""
    target_probs = torch.tensor([[[0.0, 0.6, 0.4], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    draft_probs = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64)
    parents = torch.tensor([[-1]]) if decoder.drafts in TREES else None
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), draft_probs, parents)
    verification = decoder.rule(proposal, target_probs, Scripted({Stream.ACCEPT: 0.0, Stream.RESIDUAL: 0.5}))
    return bool(verification.num_accepted_tokens[0])


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    del scored
    result = CheckResult(
        id="exactness",
        claim=exactness.claim,
        verdict=Verdict.NOT_RUN,
        summary="the engine's rule can't be reached; lossless and qualify test it from outside",
        reproduce=reproduce(subject, plan, "exactness"),
    )
    if subject.decoder is None:
        return result
    findings: list[Finding] = []
    distances: dict[str, float] = {}
    for name, target, draft in instances():
        drafter = drafter_for(subject.decoder.drafts, draft, _VOCAB, branching=_BRANCHING)
        decoder = replace(subject.decoder, target=target, drafter=drafter, num_speculative_tokens=_DRAFTS)
        actual = decoded_law(decoder, max_new_tokens=_TOKENS, eos_token_ids=(1,), merge=False)
        expected = autoregressive_law(target, max_new_tokens=_TOKENS, eos_token_ids=(1,))
        distances[name] = total_variation(actual, expected)
        if distances[name] > TOLERANCE:
            worst = max({*actual, *expected}, key=lambda ids: abs(actual.get(ids, 0) - expected.get(ids, 0)))
            text = (
                f"TV distance {distances[name]:.2g} (allowed {TOLERANCE:.0g}); "
                f"worst text {list(worst)}: probability {actual.get(worst, 0):.4g}, target {expected.get(worst, 0):.4g}"
            )
            findings.append(Finding(text=text, place=f"tables '{name}', V={_VOCAB}, g={_DRAFTS}, {_TOKENS} tokens"))
    if _accepts_the_impossible(subject.decoder):
        text = (
            "a drafted token of target probability 0 is accepted when the uniform is exactly 0: compare with <, not <="
        )
        findings.append(Finding(text=text, place="u = 0"))
    largest = max(distances.values())
    summary = (
        f"{len(distances)} pairs of tables, every path: largest TV distance {largest:.1g} (allowed {TOLERANCE:.0g})"
    )
    return replace(
        result,
        verdict=Verdict.FAIL if findings else Verdict.PASS,
        summary=summary if not findings else f"{findings[0].place}: {findings[0].text}",
        findings=tuple(findings),
        measurements={"largest_tv": largest, "num_instances": len(distances)},
        num_samples=len(distances),
        sample_unit="exact laws",
        smallest_detectable=TOLERANCE,
        effect_unit="TV distance",
        advice="mend the acceptance rule before anything else: this is proof, not statistics" if findings else "",
        plots=(_plot(distances),),
    )


def _plot(distances: Mapping[str, float]) -> Plot:
    digits = tuple(-math.log10(min(max(distance, _ROUNDING), 1.0)) for distance in distances.values())
    wanted = -math.log10(TOLERANCE)
    return Plot(
        id="exactness/digits",
        title="How far the emitted law is the target's",
        x_label="pair of tables",
        y_label="decimal digits, -log10 of the TV distance",
        kind=PlotKind.BAR,
        series=(
            Series(label="emitted law against the target's", x=tuple(distances), y=digits),
            Series(label="wanted", x=(-0.5, len(digits) - 0.5), y=(wanted, wanted), dashed=True),
        ),
        caption="A bar that ends before the dashed line is a law that is not the target's.",
    )


exactness = Check(
    id="exactness",
    claim="the rule and the decode loop emit the target's law, exactly, on small tables",
    conclude=_conclude,
)
"""A proof on small instances, no sampling: V=3, two drafts, three tokens with an EOS among the ids."""
