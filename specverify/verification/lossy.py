"""Rules that trade exactness for acceptance, by design: never called lossless, and their bias is exact.

Each accepts the draft x at a context with a probability that is stated here, and replaces a rejected one from a stated law.
So the law of the next token of a one-draft step is out(v) = q(v) a(v) + (1 - Σ q a) r(v), and its distance from the target is
known at any vocabulary, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.verification import Proposal, Verification, draft_row_at, leading, row_at
from specverify.verification.chain import residual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from specverify.choices import Choices

__all__ = ["LOSSY", "LossyRule", "bias"]

Acceptance = Callable[["Float[Tensor, 'rows vocab']", "Float[Tensor, 'rows vocab']"], "Float[Tensor, 'rows vocab']"]
"""(p, q) to the probability of accepting each id, were it drafted."""


@dataclass(frozen=True)
class LossyRule:
    """How drafts are accepted, and where the token after a rejection comes from."""

    accepts: Acceptance
    from_residual: bool = False
    """Rejected drafts are replaced from [p - q]+; otherwise from the target itself."""

    def replacement(
        self, p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """The law of the token after a rejection, not normalised."""
        return residual(p, q) if self.from_residual else p

    def __call__(
        self, proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
    ) -> Verification:
        """A chain, each draft accepted by itself while those before it were."""
        k = proposal.token_ids.shape[1]
        places = torch.arange(k, device=target_probs.device)
        probs = self.accepts(target_probs[:, :k], proposal.draft_probs).gather(-1, proposal.token_ids[..., None])[
            ..., 0
        ]
        accepted = choices.accept(
            torch.where(proposal.drafted, probs, 0), stream=Stream.ACCEPT, at=places, leading=True
        )
        num_accepted = leading(accepted)
        p = row_at(target_probs, num_accepted)
        q = draft_row_at(proposal, num_accepted)
        rejected = num_accepted < proposal.num_draft_tokens
        law = torch.where(rejected[:, None], self.replacement(p, q), p)
        stream = torch.where(rejected, Stream.RESIDUAL, Stream.BONUS)
        drawn = choices.draw(law[:, None], stream=stream[:, None], at=num_accepted[:, None])
        return Verification(num_accepted, drawn[:, 0])


def bias(
    rule: LossyRule, target_probs: Float[Tensor, "rows vocab"], draft_probs: Float[Tensor, "rows vocab"]
) -> Float[Tensor, " rows"]:
    """TV distance between the next token's law under the rule and the target's, exactly, at each context."""
    p, q = target_probs.double(), draft_probs.double()
    accepted = q * rule.accepts(p, q)
    replacement = rule.replacement(p, q)
    out = accepted + (1 - accepted.sum(-1, keepdim=True)) * replacement / replacement.sum(-1, keepdim=True)
    return (out - p).abs().sum(-1) / 2


def typical(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], *, epsilon: float, delta: float
) -> Float[Tensor, "rows vocab"]:
    """Accept where p(x) > min(ε, δ exp(-H(p))) [Medusa2024, §2.3.1]."""
    del q
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    likely: Tensor = p > (delta * (-entropy).exp()).clamp(max=epsilon)
    return likely.to(p.dtype)


def above_threshold(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], *, least: float
) -> Float[Tensor, "rows vocab"]:
    """Accept where p(x) is at least a threshold, otherwise with min(1, p/q)."""
    return torch.where(p >= least, 1.0, _ratio(p, q))


def within_mass(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], *, mass: float
) -> Float[Tensor, "rows vocab"]:
    """Accept what lies in the smallest set of likeliest ids that holds `mass`: a threshold on cumulative probability."""
    del q
    ordered = p.sort(-1, descending=True)
    inside = ordered.values.cumsum(-1) - ordered.values < mass
    return torch.zeros_like(p).scatter(-1, ordered.indices, inside.to(p.dtype))


def ensemble(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], *, weight: float
) -> Float[Tensor, "rows vocab"]:
    """Accept with min(1, 1 - w + w p/q): what comes out follows w p + (1 - w) q exactly."""
    ratio = torch.where(q > 0, p / q, 1)
    return (1 - weight + weight * ratio).clamp(max=1)


def relaxed_top_k(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], *, k: int, delta: float
) -> Float[Tensor, "rows vocab"]:
    """Accept one of the k likeliest ids whose probability is at most `delta` below the largest."""
    del q
    top = p.topk(min(k, p.shape[-1]), -1).values
    close = (p >= top[..., -1:]) & (p >= top[..., :1] - delta)
    return (close & (p > 0)).to(p.dtype)


def _ratio(p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    return torch.where(p >= q, (p > 0).to(p.dtype), p / q)


LOSSY: dict[str, LossyRule] = {
    "typical": LossyRule(partial(typical, epsilon=0.09, delta=0.3)),
    "threshold": LossyRule(partial(above_threshold, least=0.3), from_residual=True),
    "cumulative-threshold": LossyRule(partial(within_mass, mass=0.9)),
    "ensemble": LossyRule(partial(ensemble, weight=0.8), from_residual=True),
    "relaxed-top-k": LossyRule(partial(relaxed_top_k, k=10, delta=0.6)),
}
"""With the settings that their papers and engines use by default."""
