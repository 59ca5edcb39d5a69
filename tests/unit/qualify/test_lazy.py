"""Torch code as it is: what is drawn by whichever function has the law that it should, and reuse is seen."""

from __future__ import annotations

import pytest
import torch

from specverify.qualify.lazy import Following
from specverify.qualify.paths import NotFollowed, every

P = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
CDF = P.cumsum(0)


def law(function, **kwargs):
    """Of what the function returns, as text."""

    def program(path):
        with Following(path):
            return str(function())

    found = {}
    for outcome, weight in every(program, **kwargs):
        found[outcome] = found.get(outcome, 0.0) + weight
    return found


def race_in_place():
    noise = torch.empty(2, 3, dtype=torch.float64)
    noise.exponential_()
    noise[1].exponential_(generator=torch.Generator())  # a view of the same memory
    return P.expand(2, 3).clone().div_(noise).argmax(-1)[1].item()


def buffer_in_place():
    buffer = torch.empty(3, dtype=torch.float64)
    buffer[:] = 1.0
    buffer.uniform_()
    return (buffer[0] < CDF).double().argmax().item()


def python_floats():
    uniform = torch.rand(1, dtype=torch.float64).tolist()[0]
    return next(token for token, edge in enumerate(CDF.tolist()) if uniform < edge)


def gumbel_maximum():
    gumbel = -torch.log(-torch.log(torch.rand_like(P).clamp(min=1e-10)))
    return (P.log() + gumbel).max(-1).indices.item()


DRAWS = [
    lambda: torch.multinomial(P, 1).item(),
    lambda: int(torch.multinomial(P.expand(4, 3), 1)[2]),
    lambda: torch.distributions.Categorical(P, validate_args=False).sample().item(),
    lambda: (P / torch.empty_like(P).exponential_()).argmax().item(),
    lambda: (torch.empty_like(P).exponential_() / P).argmin(dim=-1).item(),
    lambda: (P.log() - torch.rand(3, dtype=torch.float64).log().neg().log()).argmax(-1, keepdim=True).item(),
    gumbel_maximum,
    lambda: (torch.empty_like(P).exponential_().log() - P.log()).argmin().item(),
    lambda: torch.searchsorted(CDF, torch.rand(1, dtype=torch.float64), right=True).item(),
    lambda: torch.searchsorted(CDF, 1 - torch.rand(1, dtype=torch.float64)).item(),
    lambda: (torch.rand(1, dtype=torch.float64) < CDF).double().argmax().item(),
    lambda: int((torch.rand((), dtype=torch.float64) >= CDF).sum()),
    race_in_place,
    buffer_in_place,
    python_floats,
]


@pytest.mark.parametrize("draw", DRAWS, ids=range(len(DRAWS)))
def test_every_way_of_drawing_has_its_law(draw):
    """Races, inverse distributions, views and Python floats."""
    assert law(draw) == pytest.approx({"0": 0.2, "1": 0.3, "2": 0.5}, abs=1e-12)


COMPARISONS = [
    lambda: bool(torch.rand((), dtype=torch.float64) < 0.25),
    lambda: bool(torch.rand((), dtype=torch.float64) < 0.25),
    lambda: bool(1 - torch.rand((), dtype=torch.float64) > 0.75),
    lambda: bool(torch.rand((), dtype=torch.float64) * 2 - 1 < -0.5),
    lambda: bool(torch.rand((), dtype=torch.float64).log() < torch.tensor(0.25).log()),
    lambda: bool(torch.empty((), dtype=torch.float64).exponential_() > -torch.tensor(0.25, dtype=torch.float64).log()),
    lambda: bool(torch.bernoulli(torch.tensor(0.25))),
    lambda: torch.rand((), dtype=torch.float64).item() * 4 < 1,
    lambda: bool(torch.stack((torch.rand(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)))[0, 1] < 0.25),
    lambda: bool(torch.rand(2, 1, dtype=torch.float64).t().squeeze(0).flip(0)[1] < 0.25),
]


@pytest.mark.parametrize("compare", COMPARISONS, ids=range(len(COMPARISONS)))
def test_every_way_of_comparing_has_its_probability(compare):
    """Affine, logarithmic, mirrored, moved about."""
    assert law(compare) == pytest.approx({"True": 0.25, "False": 0.75}, abs=1e-7)


def test_a_uniform_that_is_used_twice_is_seen():
    """Rejected by u >= 1/2, so what it draws afterwards is never the first half."""

    def reused():
        uniform = torch.rand(1, dtype=torch.float64)
        return None if uniform < 0.5 else torch.searchsorted(CDF, uniform, right=True).item()

    assert law(reused) == pytest.approx({"None": 0.5, "2": 0.5}, abs=1e-12)
    assert law(reused, independent=True) == pytest.approx({"None": 0.5, "0": 0.1, "1": 0.15, "2": 0.25}, abs=1e-12)


def test_an_id_that_nothing_looks_at_is_not_decided():
    """Four rows are drawn and one is used: three paths, not 81."""
    paths = []

    def program(path):
        with Following(path):
            drawn = torch.multinomial(P.expand(4, 3), 1)[:, 0]
            paths.append(torch.where(torch.tensor([True, False, False, False]), drawn, -1).tolist())

    assert len(list(every(program))) == 3
    assert {row[0] for row in paths} == {0, 1, 2}
    assert all(row[1:] == [-1, -1, -1] for row in paths)


UNFOLLOWED = [
    (lambda: torch.randn(3) > 0, "draws by torch's randn"),
    (lambda: torch.rand(3).sin(), "sin"),
    (lambda: float(torch.rand(1).item()), "Python float"),
    (lambda: torch.rand(2)[0] < torch.rand(2)[1], "compared with each other"),
    (lambda: torch.multinomial(P, 2), "without replacement"),
    (lambda: torch.rand(2) * torch.rand(2), "mul"),
]


@pytest.mark.parametrize(("function", "said"), UNFOLLOWED, ids=[said for _, said in UNFOLLOWED])
def test_what_is_not_followed_says_what_it_was(function, said):
    """So that nobody takes a sample for a proof."""
    with pytest.raises(NotFollowed, match=said):
        law(function)


def test_the_same_race_noise_for_two_draws_is_not_followed():
    """Its joint law isn't computed here."""

    def twice():
        noise = torch.empty(3).exponential_()
        return (P / noise).argmax().item(), (P.flip(0) / noise).argmax().item()

    with pytest.raises(NotFollowed, match="decide a draw and something else"):
        law(twice)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8)])
def test_the_precision_of_what_is_drawn_is_known(dtype, bits):
    """Of exponentials as of uniforms: a function that races in float32 is held to float32."""
    for draw in (lambda: torch.rand(3, dtype=dtype), lambda: torch.empty(3, dtype=dtype).exponential_()):

        def program(path, draw=draw):
            with Following(path):
                draw()
            return path.coarsest

        assert [coarsest for coarsest, _ in every(program)] == [2**bits]


def test_an_empty_row_raises_what_torch_raises():
    """The function breaks as it would."""
    with pytest.raises(RuntimeError, match="probability"):
        law(lambda: torch.multinomial(torch.full((3,), torch.nan), 1))
