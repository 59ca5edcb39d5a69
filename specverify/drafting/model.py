"""A chain of drafts from a smaller language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.context import Context, pad_vocab
from specverify.drafting.drafter import catch_up, open_shared, pick
from specverify.sampling import probabilities
from specverify.verification import Proposal, row_at

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from specverify.drafting.drafter import Drafting
    from specverify.models import LanguageModel, Session

__all__ = ["DraftModel"]


@dataclass(frozen=True)
class DraftModel:
    """Drafts drawn one after the other from a smaller language model, under the request's own sampling parameters.

    A row's proposal ends after an id that the draft model has no embedding for. That is exact: whether to go on depends
    on what was drawn, whether to keep it does not.
    """

    model: LanguageModel
    vocab_size: int
    """The target's; ids that the target does not have are never drafted."""
    coupled: bool = False
    """Drawn by the race that the target's own draw will run [Daliri2024]."""

    def __call__(self, context: Context) -> Drafting:
        """Prefill the prompts."""
        return _ModelDrafting(self.model, self.vocab_size, self.coupled, open_shared(self.model, context))


@dataclass
class _ModelDrafting:
    model: LanguageModel
    vocab_size: int
    coupled: bool
    session: Session

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        block, sizes, num_tokens = catch_up(self.model, self.session, context, max_tokens)
        ids = torch.zeros(len(num_tokens), 0, dtype=torch.int64, device=block.device)
        laws: list[Tensor] = []
        places = torch.arange(int(num_tokens.max()), device=block.device)
        reads_prefix = context.reads_prefix
        least, all_readable = int(num_tokens.min()), self.vocab_size <= self.model.num_embeddings
        while (place := len(laws)) < len(places) and (all_readable or bool((num_tokens > place).any())):
            if least <= place:
                sizes = torch.where(num_tokens > place, sizes, 0)
            logits = self.session.append(block, sizes)
            logits = logits[:, 0] if block.shape[1] == 1 else row_at(logits, (sizes - 1).clamp(min=0))
            law = probabilities(
                pad_vocab(logits, self.vocab_size)[:, None],
                context.params,
                token_ids=context.with_drafts(ids) if reads_prefix else context.token_ids,
                prefix_lengths=context.lengths[:, None] + place,
                prompt_lengths=context.prompt_lengths,
            )
            if least <= place:
                nothing = torch.eye(1, self.vocab_size, dtype=torch.float64, device=block.device)
                law = torch.where((num_tokens > place)[:, None, None], law, nothing)  # so that the draw has one outcome
            block = pick(context.choices, law, coupled=self.coupled, stream=Stream.DRAFT, at=places[place : place + 1])
            sizes = torch.ones_like(sizes)
            ids = torch.cat((ids, block), 1)
            laws.append(law)
            if not all_readable:
                unreadable = block[:, 0] >= self.model.num_embeddings
                num_tokens = torch.where(unreadable, num_tokens.clamp(max=place + 1), num_tokens)
                least = int(num_tokens.min())
        if not laws:
            return Proposal.point_masses(ids, num_tokens, self.vocab_size)
        proposal = Proposal(ids, num_tokens, torch.cat(laws, 1))
        if least < len(laws):
            proposal.draft_probs[~proposal.drafted] = 0
        return proposal

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.session.select(rows)
