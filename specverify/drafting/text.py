"""Drafts from a model of another tokenizer, by way of their text: for pairs that share too few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specverify.verification import Proposal, row_at
from specverify.verification.vocabularies import round_trip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.drafting.drafter import Drafting
    from specverify.models import LanguageModel, Session

__all__ = ["TextDraft", "Tokenizer"]


class Tokenizer(Protocol):
    """What a tokenizer does; no special ids are added, and none skipped."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...


@dataclass(frozen=True)
class TextDraft:
    """The draft model's most probable next tokens after the same text, encoded as the target would [Timor2025, Alg. 1].

    They are chosen and not drawn, so they are point masses, which any rule over chains verifies losslessly.
    """

    model: LanguageModel
    own: Tokenizer
    target: Tokenizer
    vocab_size: int
    """The target's; nothing is proposed from an id on that the target can't emit."""

    def __call__(self, context: Context) -> Drafting:
        """Rows that hold nothing yet: the first proposal prefills them."""
        return _TextDrafting(self, self.model.open([()] * len(context.rows)), [[] for _ in context.rows])


@dataclass
class _TextDrafting:
    drafter: TextDraft
    session: Session
    held: list[list[int]]
    """The draft's ids that each row of the session holds."""

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        said = [ids[:length] for ids, length in zip(context.token_ids.tolist(), context.lengths.tolist(), strict=True)]
        limits: list[int] = max_tokens.tolist()
        drafts = self._continued([self.drafter.own.encode(self.drafter.target.decode(ids)) for ids in said], limits)
        proposed = [self._as_target(draft, ids)[:limit] for draft, ids, limit in zip(drafts, said, limits, strict=True)]
        longest = max(map(len, proposed))
        padded = [[*ids, *[0] * (longest - len(ids))] for ids in proposed]
        device = context.token_ids.device
        token_ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), longest)
        counts = torch.tensor([len(ids) for ids in proposed], device=device)
        return Proposal.point_masses(token_ids, counts, self.drafter.vocab_size)

    def _continued(self, texts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
        """The likeliest ids after each text: one more than may be proposed, since the round trip leaves the last one out."""
        device, drafts = self.drafter.model.device, [list[int]() for _ in texts]
        wanted = [
            limit + 1 if limit and ids and len(ids) + limit + 1 <= self.drafter.model.max_length else 0
            for ids, limit in zip(texts, limits, strict=True)
        ]
        kept = [
            _shared(old, new[:-1]) if number else len(old)
            for old, new, number in zip(self.held, texts, wanted, strict=True)
        ]
        self.session.rollback(torch.tensor(kept, device=device))
        rows = zip(self.held, texts, kept, wanted, strict=True)
        blocks = [list(new[same:]) if number else [] for _, new, same, number in rows]
        self.held = [[*old[:same], *block] for old, same, block in zip(self.held, kept, blocks, strict=True)]
        while any(blocks):
            sizes = torch.tensor([len(block) for block in blocks], device=device)
            width = int(sizes.max())
            ids = torch.tensor([[*block, *[0] * (width - len(block))] for block in blocks], device=device)
            likeliest = row_at(self.session.append(ids, sizes), (sizes - 1).clamp(min=0)).argmax(-1).tolist()
            for draft, block, token in zip(drafts, blocks, likeliest, strict=True):
                draft.extend([token] if block else [])
            goes_on = [
                bool(block) and len(draft) < number and draft[-1] < self.drafter.model.num_embeddings
                for draft, block, number in zip(drafts, blocks, wanted, strict=True)
            ]
            blocks = [[draft[-1]] if on else [] for draft, on in zip(drafts, goes_on, strict=True)]
            for held, block in zip(self.held, blocks, strict=True):
                held.extend(block)
        return drafts

    def _as_target(self, draft: Sequence[int], said: Sequence[int]) -> list[int]:
        if not draft:
            return []
        target = self.drafter.target
        ids = round_trip(
            draft,
            said=said,
            decode_draft=self.drafter.own.decode,
            decode_target=target.decode,
            encode_target=target.encode,
        )
        unsayable = (place for place, token in enumerate(ids) if token >= self.drafter.vocab_size)
        return list(ids[: next(unsayable, len(ids))])

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.session.select(rows)
        self.held = [list(self.held[row]) for row in rows.tolist()]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Ids at the start of both."""
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )
