"""What a drafter is, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from specverify.context import Context

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.choices import Choices, Stream
    from specverify.models import LanguageModel, Session
    from specverify.verification import Proposal

__all__ = ["Drafter", "Drafting", "catch_up", "open_shared", "pick"]


class Drafting(Protocol):
    """A drafter at work on one batch."""

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        """At most `max_tokens[b]` ids one after the other for each row, which may be none."""
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


def catch_up(
    model: LanguageModel, session: Session, context: Context, max_tokens: Int[Tensor, " batch"]
) -> tuple[Int[Tensor, "batch n"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Forget what was rejected; the ids that the session still lacks, how many, and how many tokens can be drafted.

    That is none where the draft model has no positions left, or was told an id that it has no embedding for.
    """
    session.rollback(torch.minimum(session.lengths, context.lengths - 1))
    block, sizes = context.catch_up(session.lengths)
    num_tokens = torch.minimum(max_tokens, model.max_length - context.lengths + 1).clamp(min=0)
    lacking = torch.arange(block.shape[1], device=block.device) < sizes[:, None]
    unreadable = ((block >= model.num_embeddings) & lacking).any(1)
    return block, sizes, torch.where(unreadable, 0, num_tokens)


def pick(
    choices: Choices, probs: Float[Tensor, "batch n vocab"], *, coupled: bool, stream: Stream, at: Int[Tensor, " n"]
) -> Int[Tensor, "batch n"]:
    """One id from each law: of the race that is keyed by the position alone where draft and target are coupled."""
    if coupled:
        return choices.race(probs, at=at)
    return choices.draw(probs, stream=stream, at=at)
