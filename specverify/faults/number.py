"""Numbers that are not what they seem: half precision, NaN, and ids beyond the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.decoding import first_stop
from specverify.faults.fault import Fault
from specverify.faults.rule import rule, told
from specverify.records import FinishReason
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.records import SamplingParams
    from specverify.verification import Proposal

__all__ = ["NUMBER_FAULTS"]


def _law_bfloat16(
    logits: Float[Tensor, "batch n vocab"],
    params: Sequence[SamplingParams],
    *,
    token_ids: Int[Tensor, "batch length"],
    prefix_lengths: Int[Tensor, "batch n"],
    prompt_lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch n vocab"]:
    """Probabilities rounded to bfloat16."""
    law = probabilities(
        logits, params, token_ids=token_ids, prefix_lengths=prefix_lengths, prompt_lengths=prompt_lengths
    )
    return law.bfloat16().double()


def _law_of_nan(
    logits: Float[Tensor, "batch n vocab"],
    params: Sequence[SamplingParams],
    *,
    token_ids: Int[Tensor, "batch length"],
    prefix_lengths: Int[Tensor, "batch n"],
    prompt_lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch n vocab"]:
    """Every third position overflows; its NaN row is read as zeros, a uniform law (id 0 at temperature 0)."""
    overflown = torch.where((prefix_lengths % 3 == 0)[..., None], torch.nan, logits)
    return probabilities(
        overflown.nan_to_num(0),
        params,
        token_ids=token_ids,
        prefix_lengths=prefix_lengths,
        prompt_lengths=prompt_lengths,
    )


def _float16(proposal: Proposal) -> Proposal:
    return replace(proposal, draft_probs=proposal.draft_probs.half().double())


def _second_row_of_nan(proposal: Proposal) -> Proposal:
    """The law of each second draft overflows, and its NaN row is read as zeros: p / 0 accepts it."""
    places = torch.arange(proposal.token_ids.shape[1], device=proposal.token_ids.device)
    overflown = torch.where((places == 1)[:, None], torch.nan, proposal.draft_probs)
    return replace(proposal, draft_probs=overflown.nan_to_num(0))


@dataclass(frozen=True)
class _PaddedLast:
    """The last token before the limit is an output row that only pads the matrix."""

    vocab_size: int

    def __call__(
        self, context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
    ) -> list[tuple[int, FinishReason | None]]:
        cuts = first_stop(context, emitted, num_emitted)
        for row, (kept, finish) in enumerate(cuts):
            if finish is FinishReason.LENGTH:
                emitted[row, kept - 1] = self.vocab_size
        return cuts


NUMBER_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="target-probs-bfloat16",
        stands_for="the target's softmax is taken in bfloat16",
        caught_by=("exactness",),
        apply=lambda decoder: replace(decoder, law=_law_bfloat16),
    ),
    Fault(
        name="draft-probs-float16",
        stands_for="draft probabilities are stored in half precision between drafting and verification",
        caught_by=("exactness",),
        apply=rule(told(_float16)),
    ),
    Fault(
        name="nan-target-row",
        stands_for="a row of NaN is read as zeros: any token may come, and id 0 at temperature 0",
        caught_by=("exactness", "greedy"),
        apply=lambda decoder: replace(decoder, law=_law_of_nan),
    ),
    Fault(
        name="nan-draft-row",
        stands_for="a draft row of NaN is read as zeros, so that whatever was drafted there is accepted",
        caught_by=("exactness",),
        apply=rule(told(_second_row_of_nan)),
    ),
    Fault(
        name="padded-id-emitted",
        stands_for="an output row that only pads the vocabulary to a round number is emitted",
        caught_by=("greedy", "lossless"),
        apply=lambda decoder: replace(decoder, stop=_PaddedLast(decoder.target.vocab_size)),
    ),
)
"""Half precision, NaN, padded ids."""
