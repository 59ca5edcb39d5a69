"""What a fused rule is asked: drafts with their logits, sampling parameters that a row decides, and uniforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specverify.errors import InternalError
from specverify.records import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.choices import Stream

__all__ = ["PLAIN", "LogitsProposal", "Uniforms", "require_usable"]

PLAIN = SamplingParams()
"""Temperature 1, nothing cut off."""


class Uniforms(Protocol):
    """The part of `Choices` that a fused rule asks: it decides itself, so it needs the uniforms (`Philox`, `Scripted`)."""

    def uniform(self, stream: Stream | Int[Tensor, "batch n"], at: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n"]:
        """Uniforms of a stream at the offsets `at` of each row's block."""
        ...


@dataclass(frozen=True)
class LogitsProposal:
    """A chain of drafted ids and the logits that each was drawn from, after the same sampling parameters as the target's."""

    token_ids: Int[Tensor, "batch k"]
    num_draft_tokens: Int[Tensor, " batch"]
    draft_logits: Float[Tensor, "batch k vocab"]
    draft_log_sums: Float[Tensor, "batch k"] | None = None
    """The drafter's own log Σ exp of its processed scores, where it kept them: then a row of its logits is read only
    where it is rejected."""


def require_usable(params: SamplingParams) -> None:
    """Raise `InternalError` for parameters that a single row doesn't decide."""
    if params.prefix_dependent or params.banned_token_ids:
        msg = "a fused rule knows temperature, top-k, top-p and min-p; use verification.chain for what depends on the prefix"
        raise InternalError(msg)
