"""The closed forms that the e-process bets on: laws, and those of the faults that they name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specverify.choices import inverse_cdf
from specverify.fault_law import FAULT_LAWS, TARGET_ONLY_FAULT_LAWS, fault_ratios

GRID = 40_000
Law = Callable[[torch.Tensor], torch.Tensor]


def laws(kind: str, vocab_size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft laws of several rows."""
    generator = torch.Generator().manual_seed(5)
    p, q = torch.rand(2, 8, vocab_size, generator=generator, dtype=torch.float64) ** 2
    if kind == "zeros":
        p[:, 1], q[:, 2], p[:4, 4], q[:4, 4] = 0, 0, 0, 0
    if kind == "equal":
        q = p.clone()
    if kind == "disjoint":
        p[:, :3], q[:, 3:] = 0, 0
    if kind == "one-hot":
        p, q = p**30, q**30
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


KINDS = ["random", "zeros", "equal", "disjoint", "one-hot"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FAULT_LAWS, *TARGET_ONLY_FAULT_LAWS])
def test_every_fault_law_is_a_law(name: str, kind: str) -> None:
    """Never negative, never more than 1 in all."""
    p, q = laws(kind)
    law = FAULT_LAWS[name](p, q) if name in FAULT_LAWS else TARGET_ONLY_FAULT_LAWS[name](p)
    assert bool((law >= 0).all())
    assert float(law.sum(-1).max()) <= 1 + 1e-12
    assert float(law.sum(-1).min()) >= 1 - 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_bet_on_any_fault_is_fair_under_the_target(kind: str) -> None:
    """Averaged under p each ratio is at most 1: the product of ratios is an e-process, and false alarms are rare."""
    p, q = laws(kind)
    vocab_size = p.shape[-1]
    ids = torch.arange(vocab_size).repeat(len(p))
    ratios = fault_ratios(p.repeat_interleave(vocab_size, 0), q.repeat_interleave(vocab_size, 0), ids)
    assert set(ratios) == {*FAULT_LAWS, *TARGET_ONLY_FAULT_LAWS}
    for name, ratio in ratios.items():
        mean = torch.where(p > 0, p * ratio.view_as(p), 0).sum(-1)
        assert float(mean.max()) <= 1 + 1e-12, name


def test_without_a_draft_only_the_targets_own_faults_are_bet_on() -> None:
    """A black box tells no draft law."""
    p, _ = laws("random")
    assert set(fault_ratios(p, None, torch.zeros(len(p), dtype=torch.int64))) == set(TARGET_ONLY_FAULT_LAWS)


def test_an_impossible_token_is_an_infinite_ratio() -> None:
    """Under a fault that emits it; that ends the matter."""
    p, q = laws("disjoint")
    ratio = fault_ratios(p, q, torch.zeros(len(p), dtype=torch.int64))["the draft's own law is emitted"]
    assert bool(ratio.isinf().all())


def emitted_law(p: torch.Tensor, q: torch.Tensor, *, drawn: Law = lambda q: q, replacement: Law | None = None,
                shares: str = "") -> torch.Tensor:  # fmt: skip
    """The law of a first token by going through the algorithm: over a grid of uniforms where one is shared."""
    vocab_size = len(p)
    ratio = torch.where(p >= q, (p > 0).double(), p / q)
    positive = (p - q).clamp(min=0)
    rest = replacement(p - q) if replacement else positive if float(positive.sum()) > 0 else p
    rest = rest / rest.sum() if float(rest.sum()) > 0 else p
    law = torch.zeros(vocab_size, dtype=torch.float64)
    if shares == "accept and residual":
        fine = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
        refused = (q * (ratio <= fine[:, None])).sum(-1)
        return law.index_add(0, inverse_cdf(rest.expand(GRID, -1), fine), refused / GRID) + q * ratio
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    drafts = inverse_cdf(drawn(q).expand(GRID, -1), grid)
    accept = (grid < ratio[drafts]).double() if shares == "accept" else ratio[drafts]
    law.index_add_(0, drafts, accept / GRID)
    if shares == "residual":
        law.index_add_(0, inverse_cdf(rest.expand(GRID, -1), grid), (1 - accept) / GRID)
        return law
    return law + (1 - accept).mean() * rest


ALGORITHMS: dict[str, dict[str, object]] = {
    "residual drawn from the target": {"replacement": None},
    "residual not clamped at zero": {"replacement": torch.abs},
    "draft sharper than reported": {"drawn": lambda q: q**1.25},
    "draft truncated, raw law reported": {"drawn": lambda q: q},
    "greedy draft, softmax reported": {"drawn": lambda q: torch.nn.functional.one_hot(q.argmax(), len(q)).double()},
    "draft noise reused in acceptance": {"shares": "accept"},
    "draft noise reused in the residual": {"shares": "residual"},
    "acceptance noise reused in the residual": {"shares": "accept and residual"},
}


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_closed_forms_are_those_of_the_faulty_algorithms(name: str, kind: str) -> None:
    """Against the algorithm itself, with each fault in it, integrated over a fine grid of the draft's uniform."""
    p, q = laws(kind)
    closed = FAULT_LAWS[name](p, q)
    for row in range(4):
        options = dict(ALGORITHMS[name])
        if name == "residual drawn from the target":
            options = {"replacement": lambda _, its=p[row]: its}
        stepped = emitted_law(p[row], q[row], **options)
        assert float((closed[row] - stepped).abs().max()) < 3 / GRID * len(p[row]), row


def test_without_a_fault_the_stepped_algorithm_gives_the_target() -> None:
    """The yardstick of the test above is itself lossless."""
    p, q = laws("zeros")
    for row in range(len(p)):
        assert float((emitted_law(p[row], q[row]) - p[row]).abs().max()) < 3 / GRID * len(p[row])


def test_truncation_keeps_the_twenty_likeliest() -> None:
    """At a vocabulary beyond twenty: drafts from the head of q, acceptance and residual by the whole of it."""
    p, q = laws("random", vocab_size=40)
    smallest = q.sort(-1, descending=True).values[:, 19:20]
    for row in range(4):
        stepped = emitted_law(p[row], q[row], drawn=lambda law, least=smallest[row]: torch.where(law >= least, law, 0))
        closed = FAULT_LAWS["draft truncated, raw law reported"](p, q)[row]
        assert float((closed - stepped).abs().max()) < 3 / GRID * 40
