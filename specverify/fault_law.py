"""The law of the next token under each known fault, in closed form: what the e-process bets on, and what it names.

Each function maps the target's law p and the draft's law q at a context to the law r of the emitted token under one
fault, divided by p at the tokens that were emitted. Averaged under p such a ratio is at most 1, so its running product is
an e-process, and the fault whose product grows is the likeliest one. Formulas: the study's §3.1, checked against the
faults themselves by exact enumeration in the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["FAULT_LAWS", "NOISE_LAWS", "TARGET_ONLY_FAULT_LAWS", "fault_ratios"]

_TRUNCATED_TO = 20


def fault_ratios(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"] | None, x: Int[Tensor, " n"]
) -> dict[str, Float[Tensor, " n"]]:
    """r(x) / p(x) under every fault that the laws at hand can express; infinite where the target gives x nothing."""
    p_x = _at(p, x)
    laws = {name: law(p) for name, law in TARGET_ONLY_FAULT_LAWS.items()}
    if q is not None:
        laws |= {name: law(p, q) for name, law in FAULT_LAWS.items()}
    return {name: _at(law, x) / p_x for name, law in laws.items()}


def _at(law: Float[Tensor, "n vocab"], x: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    return law.gather(-1, x[:, None])[:, 0]


def _normalised(mass: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), 0)


def _residual(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    positive = (p - q).clamp(min=0)
    return torch.where(positive.sum(-1, keepdim=True) > 0, _normalised(positive), p)


def _ratio(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """min(1, p/q), the probability that a drafted token is accepted."""
    return torch.where(p >= q, (p > 0).to(p.dtype), p / q)


def _sharper(law: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """law^1.25, temperature 0.8, by roots: a general power costs ten times as much."""
    return law * law.sqrt().sqrt()


def _topped_up(accepted: Float[Tensor, "n vocab"], rest: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The mass that was accepted, and what is missing to 1 from `rest`."""
    return accepted + (1 - accepted.sum(-1, keepdim=True)).clamp(min=0) * rest


def draft_law(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Every draft accepted, or (as a small share) the bonus drawn from the draft: r = q."""
    del p
    return q


def residual_not_subtracted(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The replacement drawn from the target itself."""
    return _topped_up(torch.minimum(p, q), p)


def residual_not_clamped(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The replacement drawn from |p - q|."""
    return _topped_up(torch.minimum(p, q), _normalised((p - q).abs()))


def _drafted_otherwise(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], really: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """Drafts really drawn from another law than the q that the rule was told."""
    return _topped_up(really * _ratio(p, q), _residual(p, q))


def draft_sharpened(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Drafts drawn at temperature 0.8 of what was reported."""
    return _drafted_otherwise(p, q, _normalised(_sharper(q)))


def draft_truncated(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Drafts drawn after top-k, the raw law reported."""
    smallest = q.topk(min(_TRUNCATED_TO, q.shape[-1]), -1).values[:, -1:]
    return _drafted_otherwise(p, q, _normalised(torch.where(q >= smallest, q, 0)))


def draft_argmax(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Greedy drafts, the softmax reported."""
    return _drafted_otherwise(p, q, torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1))


def noise_shared_by_draft_and_accept(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """One uniform u draws the draft (inverse CDF by id) and accepts it: x is drafted for u in [F(x-), F(x))."""
    above = q.cumsum(-1)
    below = above - q
    accepted = (torch.minimum(above, _ratio(p, q)) - below).clamp(min=0)
    return _topped_up(accepted, _residual(p, q))


def noise_shared_by_draft_and_residual(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """One uniform draws the draft and, after its rejection, the residual (both inverse CDF by id)."""
    refused = (q * (1 - _ratio(p, q))).cumsum(-1)  # mass of u below F_q(v) at which the draft is rejected
    draft_cdf = q.cumsum(-1)
    residual_cdf = _residual(p, q).cumsum(-1).clamp(max=1)
    draft_cdf, refused = (torch.nn.functional.pad(each, (1, 0)) for each in (draft_cdf, refused))
    right = torch.searchsorted(draft_cdf.contiguous(), residual_cdf.contiguous()).clamp(1, draft_cdf.shape[-1] - 1)
    lower, upper = draft_cdf.gather(-1, right - 1), draft_cdf.gather(-1, right)
    inside = torch.where(upper > lower, (residual_cdf - lower) / (upper - lower).clamp(min=1e-300), 1).clamp(0, 1)
    reached = refused.gather(-1, right - 1) * (1 - inside) + refused.gather(-1, right) * inside
    replaced = reached.diff(dim=-1, prepend=torch.zeros_like(reached[:, :1])).clamp(min=0)
    return torch.minimum(p, q) + replaced


def noise_shared_by_accept_and_residual(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n vocab"]:
    """One uniform rejects the draft and draws its replacement (inverse CDF by id).

    u rejects x where it is at least min(1, p/q)(x), so with probability G(u) = Σ q(x) 1[min(1, p/q)(x) <= u]. Id v replaces
    it for u in its interval of the residual's CDF: with probability H(F(v)) - H(F(v-)), H the integral of G.
    """
    ratio, order = _ratio(p, q).sort(-1)
    mass = q.gather(-1, order)
    below, moment = (torch.nn.functional.pad(each.cumsum(-1), (1, 0)) for each in (mass, mass * ratio))
    cdf = torch.nn.functional.pad(_residual(p, q).cumsum(-1).clamp(max=1), (1, 0))
    reached = torch.searchsorted(ratio.contiguous(), cdf.contiguous(), right=True)
    integral = cdf * below.gather(-1, reached) - moment.gather(-1, reached)
    return torch.minimum(p, q) + integral.diff(dim=-1).clamp(min=0)


def leaning_to_draft(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """P tilted by exp(q / (p + q)): the balance score of the study as a bet; it sees any leak of the draft."""
    return _normalised(p * torch.where(p + q > 0, q / (p + q).clamp(min=torch.finfo(p.dtype).tiny), 0).exp())


def target_sharpened(p: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The target at temperature 0.8."""
    return _normalised(_sharper(p))


def target_flattened(p: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The target at temperature 4/3."""
    return _normalised(p.sqrt() * p.sqrt().sqrt())


def target_argmax(p: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Greedy verification of a sampled request."""
    return torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1)


FAULT_LAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the draft's own law is emitted": draft_law,
    "residual drawn from the target": residual_not_subtracted,
    "residual not clamped at zero": residual_not_clamped,
    "draft sharper than reported": draft_sharpened,
    "draft truncated, raw law reported": draft_truncated,
    "greedy draft, softmax reported": draft_argmax,
    "draft noise reused in acceptance": noise_shared_by_draft_and_accept,
    "draft noise reused in the residual": noise_shared_by_draft_and_residual,
    "acceptance noise reused in the residual": noise_shared_by_accept_and_residual,
    "tokens lean towards the draft": leaning_to_draft,
}
"""Faults of a rule or a drafter, by the name that a verdict prints."""

NOISE_LAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "draft-noise-in-accept": noise_shared_by_draft_and_accept,
    "draft-noise-in-residual": noise_shared_by_draft_and_residual,
    "accept-noise-in-residual": noise_shared_by_accept_and_residual,
}
"""Planted faults whose law is not that of the questions that the rule asks, because the answers share a uniform."""

TARGET_ONLY_FAULT_LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "target sharper than asked": target_sharpened,
    "target flatter than asked": target_flattened,
    "greedy verification": target_argmax,
}
"""Faults that need only the target's law."""
