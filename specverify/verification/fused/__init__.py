"""Rules straight from logits: what a serving engine runs, in one pass over what it needs, and no more.

Note [Fused]: a rule of `verification.chain` wants every law in float64, which is right for a proof and 26 rows of traffic
where 11 are needed. Here each row is read at most once, no law is kept, and one token is drawn by one scan. The decisions
are those of the float64 rule with the same choices: the same number of accepted tokens, always, and the same token unless
its uniform lies within rounding of the border between two ids. On the CPU `rows` does it with torch's own loops, on CUDA
`kernels` with Triton.

Sampling parameters are those whose law does not depend on the prefix: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.verification.fused import rows
from specverify.verification.fused.proposal import PLAIN, LogitsProposal, Uniforms

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from specverify.records import SamplingParams
    from specverify.verification import Verification

__all__ = ["LogitsProposal", "Uniforms", "chain_rejection"]


def chain_rejection(
    proposal: LogitsProposal,
    target_logits: Float[Tensor, "batch k_plus_1 padded"],
    choices: Uniforms,
    params: SamplingParams = PLAIN,
    *,
    vocab_size: int | None = None,
) -> Verification:
    """`verification.chain.chain_rejection` of the laws of these logits, where they lie: Triton on CUDA, else the CPU's.

    Ids from `vocab_size` on are padding of the output layers, and never emitted. Raises `NonFiniteLogits`.
    """
    if target_logits.device.type != "cuda":
        return rows.chain_rejection(proposal, target_logits, choices, params, vocab_size=vocab_size)
    from specverify.verification.fused import kernels  # noqa: PLC0415 - Triton is there with CUDA alone

    return kernels.chain_rejection(proposal, target_logits, kernels.keyed(choices), params, vocab_size=vocab_size)
