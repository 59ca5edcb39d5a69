"""Drafts that no model draws: scripted, copied from the prompt, or none; always a chain of point masses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.verification import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.drafting.drafter import Drafting

__all__ = ["NoDraft", "PromptLookup", "ScriptedDrafts"]


@dataclass(frozen=True)
class ScriptedDrafts:
    """Drafts chosen by a function of (tokens so far, step): any accept pattern, empty drafts, EOS at any offset."""

    choose: Callable[[Sequence[int], int], Sequence[int]]
    vocab_size: int

    def __call__(self, context: Context) -> Drafting:
        """Nothing to prepare."""
        del context
        return self

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        """The script's ids, as point masses, cut to what fits."""
        chosen = [
            list(self.choose(ids[:length], step))[:most]
            for ids, length, step, most in zip(
                context.token_ids.tolist(),
                context.lengths.tolist(),
                context.step.tolist(),
                max_tokens.tolist(),
                strict=True,
            )
        ]
        longest = max(map(len, chosen))
        device = context.token_ids.device
        ids = torch.tensor([one + [0] * (longest - len(one)) for one in chosen], dtype=torch.int64, device=device)
        counts = torch.tensor([len(one) for one in chosen], device=device)
        return Proposal.point_masses(ids.view(len(chosen), longest), counts, self.vocab_size)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """No state."""


def PromptLookup(vocab_size: int, *, max_ngram: int = 3) -> ScriptedDrafts:  # noqa: N802 - reads as its siblings do
    """Drafts copied from what followed the latest earlier occurrence of the last tokens [Saxena2023]."""

    def lookup(tokens: Sequence[int], step: int) -> Sequence[int]:
        del step
        for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
            tail = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == tail:
                    return tokens[start + n :]
        return ()

    return ScriptedDrafts(lookup, vocab_size)


def NoDraft(vocab_size: int) -> ScriptedDrafts:  # noqa: N802 - reads as its siblings do
    """Never drafts: every step emits one token of the target's."""
    return ScriptedDrafts(lambda *_: (), vocab_size)
