"""Where proposals come from. A drafter opens a `Drafting` for a batch; that proposes, and forgets rows that leave.

Every proposal carries the law that its ids were really drawn from: a point mass for what is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specverify.choices import Stream
from specverify.context import Context, pad_vocab
from specverify.sampling import probabilities
from specverify.verification import Proposal, row_at

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from specverify.models import LanguageModel, Session

__all__ = ["DraftModel", "Drafter", "Drafting", "NoDraft", "PromptLookup", "ScriptedDrafts", "open_shared"]


class Drafting(Protocol):
    """A drafter at work on one batch."""

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        """At most `max_tokens[b]` ids for each row, which may be none."""
        ...

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows."""
        ...


Drafter = Callable[[Context], Drafting]


def open_shared(model: LanguageModel, context: Context) -> Session:
    """A session that holds all but the last token of each row's prompt; prompts that are equal are prefilled once."""
    prompts = [row.request.prompt_ids[:-1] for row in context.rows]
    unique = list(dict.fromkeys(prompts))
    place = {prompt: index for index, prompt in enumerate(unique)}
    session = model.open(unique)
    if len(unique) < len(prompts):
        session.select(torch.tensor([place[prompt] for prompt in prompts], device=model.device))
    return session


@dataclass(frozen=True)
class DraftModel:
    """Drafts drawn one after the other from a smaller language model, under the request's own sampling parameters."""

    model: LanguageModel
    vocab_size: int
    """The target's; ids that the target does not have are never drafted."""

    def __call__(self, context: Context) -> Drafting:
        """Prefill the prompts."""
        return _ModelDrafting(self.model, self.vocab_size, open_shared(self.model, context))


@dataclass
class _ModelDrafting:
    model: LanguageModel
    vocab_size: int
    session: Session

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        num_tokens = torch.minimum(max_tokens, self.model.max_length - context.lengths + 1).clamp(min=0)
        self.session.rollback(torch.minimum(self.session.lengths, context.lengths - 1))
        block, sizes = context.catch_up(self.session.lengths)
        ids = torch.zeros(len(num_tokens), 0, dtype=torch.int64, device=block.device)
        nothing = torch.eye(1, self.vocab_size, dtype=torch.float64, device=block.device)
        laws = []
        for place in range(int(num_tokens.max())):
            sizes = torch.where(num_tokens > place, sizes, 0)
            logits = row_at(self.session.append(block, sizes), (sizes - 1).clamp(min=0))
            law = probabilities(
                pad_vocab(logits, self.vocab_size)[:, None],
                context.params,
                token_ids=context.with_drafts(ids),
                prefix_lengths=context.lengths[:, None] + place,
                prompt_lengths=context.prompt_lengths,
            )
            law = torch.where((num_tokens > place)[:, None, None], law, nothing)  # so that the draw has one outcome
            at = torch.tensor([place], device=block.device)
            block, sizes = context.choices.draw(law, stream=Stream.DRAFT, at=at), torch.ones_like(sizes)
            ids = torch.cat((ids, block), 1)
            laws.append(law)
        if not laws:
            return Proposal.point_masses(ids, num_tokens, self.vocab_size)
        drafted = (torch.arange(len(laws), device=ids.device) < num_tokens[:, None])[..., None]
        return Proposal(ids, num_tokens, torch.where(drafted, torch.cat(laws, 1), 0))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.session.select(rows)


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
