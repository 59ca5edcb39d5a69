"""Lossy rules: their bias in closed form is what the rule really does."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.choices.scripted import Scripted
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.lossy import LOSSY, LossyRule, bias, ensemble, relaxed_top_k


def stepped(rule: LossyRule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The law of the first token of a one-draft step, over every path."""
    law = torch.zeros_like(p)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        ids = choices.draw(q.expand(paths, 1, -1), stream=Stream.DRAFT, at=torch.tensor([0]))
        proposal = Proposal(ids, torch.ones(paths, dtype=torch.int64), q.expand(paths, 1, -1))
        verification = rule(proposal, p.expand(paths, 2, -1), choices)
        return torch.where(verification.num_accepted_tokens > 0, ids[:, 0], verification.next_token_ids)

    for outcome, weight in every_path(program):
        law.index_add_(0, outcome, weight)
    return law


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSY)
def test_the_bias_is_that_of_the_rule(name: str, seed: int):
    """Against every path of the rule itself."""
    p, q = random_table(5, 1, seed=seed, zeros=0.2).levels[1].exp()[:2]
    expected = float((stepped(LOSSY[name], p, q) - p).abs().sum() / 2)
    assert float(bias(LOSSY[name], p[None], q[None])) == pytest.approx(expected, abs=1e-12)


def test_an_ensemble_emits_exactly_the_mixture():
    """W p + (1 - w) q, so it is lossless with respect to that, and off from p by (1 - w) TV."""
    p, q = random_table(5, 1, seed=9).levels[1].exp()[:2]
    law = stepped(LOSSY["ensemble"], p, q)
    assert law.tolist() == pytest.approx((0.8 * p + 0.2 * q).tolist(), abs=1e-12)


def test_with_no_weight_on_the_draft_an_ensemble_is_lossless():
    """The bias can be 0."""
    p, q = random_table(5, 1, seed=9).levels[1].exp()[:2]
    exact = LossyRule(lambda p, q: ensemble(p, q, weight=1.0), from_residual=True)
    assert float(bias(exact, p[None], q[None])) == pytest.approx(0, abs=1e-12)


def test_relaxed_top_k_accepts_nothing_impossible():
    """Where fewer than k ids have any probability."""
    p = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)
    assert LOSSY["relaxed-top-k"].accepts(p, torch.full_like(p, 1 / 3)).tolist() == [[1.0, 1.0, 0.0]]


def accepted(name: str, p: list[float], q: list[float] | None = None) -> list[float]:
    """The probability of accepting each id, at one context."""
    laws = [torch.tensor([row], dtype=torch.float64) for row in (p, q or [1 / len(p)] * len(p))]
    return LOSSY[name].accepts(*laws)[0].tolist()


def test_each_accepts_what_its_paper_says():
    """By hand, with ids that stand exactly on the border."""
    assert accepted("typical", [0.9, 0.09, 0.01]) == [1, 0, 0], "0.09 is not above epsilon"
    assert accepted("typical", [1 / 16] * 16) == [1] * 16, "0.3 / 16 is the threshold of a flat law"
    assert accepted("typical", [0.85, 0.05, 0.05, 0.05]) == [1, 0, 0, 0], "epsilon is the threshold of a steep law"
    found = accepted("threshold", [0.3, 0.2, 0.0, 0.25, 0.25], [0.6, 0.8, 0.0, 0.2, 0.25])
    assert found == pytest.approx([1, 0.25, 0, 1, 1]), "at least 0.3, or p/q; 1 where p = q, 0 where both are 0"
    assert accepted("cumulative-threshold", [0.0625, 0.6875, 0.25]) == [0, 1, 1]
    assert LOSSY["cumulative-threshold"].accepts.func(  # the mass is reached exactly by the first two
        torch.tensor([[0.125, 0.625, 0.25]]), torch.ones(1, 3), mass=0.875
    ).tolist() == [[0, 1, 1]]
    assert accepted("ensemble", [0.6, 0.1, 0.0, 0.3], [0.2, 0.8, 0.0, 0.0]) == pytest.approx([1, 0.3, 1, 1])
    for k, delta, p, wanted in [
        (2, 0.5, [0.9, 0.1], [1, 0]),
        (1, 0.5, [0.9, 0.1], [1, 0]),
        (2, 0.5, [0.75, 0.25], [1, 1]),
        (2, 1.0, [0.5, 0.3, 0.2], [1, 1, 0]),
    ]:
        assert relaxed_top_k(torch.tensor([p]), torch.ones(1, len(p)), k=k, delta=delta).tolist() == [wanted]


@pytest.mark.parametrize("name", LOSSY)
def test_a_context_is_judged_by_itself(name: str):
    """Acceptance and bias, whatever stands beside it in the batch or the block."""
    p, q = (
        random_table(5, 1, seed=seed, zeros=0.2).levels[1].exp()[[0, 1, 2, 3, 4, 0]].view(2, 3, 5) for seed in (1, 2)
    )
    together = LOSSY[name].accepts(p, q)
    assert together.dtype == p.dtype
    biases = bias(LOSSY[name], p.flatten(0, 1), q.flatten(0, 1)).view(2, 3)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        row, at = place
        alone = p[row, at][None], q[row, at][None]
        assert torch.equal(together[row, at], LOSSY[name].accepts(*alone)[0])
        assert float(biases[row, at]) == pytest.approx(float(bias(LOSSY[name], *alone)), abs=1e-15)


def test_what_follows_a_rejection():
    """The residual where a rule is mended that way, otherwise the target."""
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.25, 0.75]])
    for name, rule in LOSSY.items():
        wanted = [0.5, 0.25, 0.0] if name in {"threshold", "ensemble"} else [0.5, 0.5, 0.0]
        assert rule.replacement(p, q).tolist() == [wanted]


@pytest.mark.parametrize("name", LOSSY)
def test_bonus_and_residual_have_streams_of_their_own(name: str):
    """And nothing is asked after a first rejection: three paths of one draft that is refused."""
    even = torch.full((1, 3, 4), 0.25, dtype=torch.float64)
    proposal = Proposal(torch.tensor([[1, 1]]), torch.tensor([2]), even[:, :2])
    largest = 1 - 2.0**-53
    said = LOSSY[name](proposal, even, Scripted({Stream.ACCEPT: 0.0, Stream.BONUS: largest, Stream.RESIDUAL: 0.0}))
    assert (said.num_accepted_tokens.tolist(), said.next_token_ids.tolist()) == ([2], [3])
    impossible = torch.tensor([0.3, 0.0, 0.3, 0.4], dtype=torch.float64).expand(1, 3, -1)
    script = {Stream.ACCEPT: largest, Stream.BONUS: 0.0, Stream.RESIDUAL: largest}
    said = LOSSY[name](proposal, impossible, Scripted(script))
    assert (said.num_accepted_tokens.tolist(), said.next_token_ids.tolist()) == ([0], [3])


def test_no_path_forks_after_a_rejection():
    """One coin and one draw: of two drafts the second is asked about where the first was accepted only."""
    p = torch.tensor([0.2, 0.8], dtype=torch.float64)
    q = torch.tensor([0.8, 0.2], dtype=torch.float64)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        proposal = Proposal(torch.zeros(paths, 2, dtype=torch.int64), torch.full((paths,), 2), q.expand(paths, 2, -1))
        return LOSSY["threshold"](proposal, p.expand(paths, 3, -1), choices).num_accepted_tokens

    found = torch.cat([outcomes for outcomes, _ in every_path(program)])
    assert found.bincount().tolist() == [1, 1, 2], "[p - q]+ is one id; the bonus is one of two"
