"""A tree of drafts from a smaller language model, level by level.

Each node of a level is a row of the draft's session (`select` with duplicates), so the draft model needs no tree
attention. Places of nodes are counted as if the tree were complete: what one row draws doesn't depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.context import Context, pad_vocab
from specverify.drafting.drafter import catch_up, open_shared
from specverify.errors import PlanError
from specverify.sampling import probabilities
from specverify.verification import Proposal, row_at
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.choices import Choices
    from specverify.drafting.drafter import Drafting
    from specverify.models import LanguageModel, Session

__all__ = ["DEFAULT_BRANCHING", "TREES", "DraftTree", "branching_of"]

DEFAULT_BRANCHING = (3, 2, 1)
"""Children of a node by its depth."""

TREES = (Drafts.WITH_REPLACEMENT, Drafts.WITHOUT_REPLACEMENT, Drafts.TOP_K)
"""The ways of drafting that give a tree."""


def branching_of(depth: int, branching: Sequence[int] = DEFAULT_BRANCHING) -> tuple[int, ...]:
    """The shape cut to `depth` levels, or made longer by single children."""
    return (*branching[:depth], *[1] * (depth - len(branching)))


@dataclass(frozen=True)
class DraftTree:
    """Several drafts for each position, under the request's own sampling parameters.

    `WITH_REPLACEMENT`: children are independent draws [SpecInfer2024]. `WITHOUT_REPLACEMENT`: each is drawn from the law
    without its earlier siblings [Sequoia2024], so there are fewer where the support is used up. `TOP_K`: the most
    probable ids, ties to the lowest, as point masses. Raises `PlanError` for another way of drafting, or no shape.
    """

    model: LanguageModel
    vocab_size: int
    """The target's; ids that the target does not have are never drafted."""
    branching: tuple[int, ...] = DEFAULT_BRANCHING
    drafts: Drafts = Drafts.WITH_REPLACEMENT

    def __post_init__(self) -> None:
        """Refuse what gives no tree."""
        if self.drafts not in TREES or not self.branching or min(self.branching) < 1:
            msg = (
                f"a tree of drafts needs at least one child a level and one of the ways "
                f"{', '.join(way.name for way in TREES)}, not {self.branching} and {self.drafts.name}"
            )
            raise PlanError(msg)

    @property
    def num_nodes(self) -> int:
        """Of the complete tree."""
        return sum(accumulate(self.branching, mul))

    def __call__(self, context: Context) -> Drafting:
        """Prefill the prompts."""
        return _TreeDrafting(self, open_shared(self.model, context))


@dataclass(frozen=True)
class _Level:
    """All nodes of one depth, complete: a node that was not drafted is marked, not left out."""

    token_ids: Int[Tensor, "batch width"]
    drafted: Bool[Tensor, "batch width"]
    laws: Float[Tensor, "batch width vocab"]
    parents: Int[Tensor, " width"]
    """Places in the complete tree."""


@dataclass
class _TreeDrafting:
    tree: DraftTree
    session: Session

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        """Level by level, one row of the session a node; then one row a sequence again, without the drafts."""
        model = self.tree.model
        block, sizes, depth = catch_up(model, self.session, context, max_tokens.clamp(max=len(self.tree.branching)))
        levels: list[_Level] = []
        rows = torch.arange(len(depth), device=block.device)  # the sequence of each row of the session
        paths = torch.zeros(len(rows), 0, dtype=torch.int64, device=block.device)
        can_go_on = torch.ones_like(rows, dtype=torch.bool)
        for number in self.tree.branching[: int(depth.max())]:
            can_go_on = can_go_on & (depth[rows] > len(levels))
            law = self._law(context, rows, paths, block, torch.where(can_go_on, sizes, 0))
            shape = (len(depth), -1)
            level = self._children(
                context.choices, law.view(*shape, law.shape[-1]), can_go_on.view(shape), levels, number
            )
            levels.append(level)
            rows, paths = rows.repeat_interleave(number), paths.repeat_interleave(number, 0)
            block = level.token_ids.reshape(-1, 1)
            sizes, paths = torch.ones_like(rows), torch.cat((paths, block), 1)
            can_go_on = level.drafted.flatten() & (block[:, 0] < model.num_embeddings)
            if len(levels) < int(depth.max()):
                self.session.select(torch.arange(len(rows), device=rows.device) // number)
        self._forget(context)
        return _proposal(levels, context, self.tree.vocab_size)

    def _law(
        self,
        context: Context,
        rows: Int[Tensor, " rows"],
        paths: Int[Tensor, "rows depth"],
        block: Int[Tensor, "rows n"],
        sizes: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows vocab"]:
        """The draft's law after each row's block, which ends its path."""
        logits = row_at(self.session.append(block, sizes), (sizes - 1).clamp(min=0))
        params = context.params
        return probabilities(
            pad_vocab(logits, self.tree.vocab_size)[:, None],
            [params[row] for row in rows.tolist()],
            token_ids=context.with_drafts(paths, rows),
            prefix_lengths=context.lengths[rows, None] + paths.shape[1],
            prompt_lengths=context.prompt_lengths[rows],
        )[:, 0]

    def _children(
        self,
        choices: Choices,
        law: Float[Tensor, "batch parents vocab"],
        can_go_on: Bool[Tensor, "batch parents"],
        levels: Sequence[_Level],
        number: int,
    ) -> _Level:
        """`number` children of each node of the level before, in the order in which they are to be tried."""
        before = sum(level.token_ids.shape[1] for level in levels)
        parents = torch.arange(law.shape[1], device=law.device)
        nothing = torch.eye(1, law.shape[-1], dtype=law.dtype, device=law.device)
        left, ids, drafted, laws = law, [], [], []
        for child in range(number):
            drafted.append(can_go_on & (left.amax(-1) > 0))
            asked = torch.where(drafted[-1][..., None], left, nothing)  # a draw of one outcome where there is no node
            if self.tree.drafts is Drafts.TOP_K:
                ids.append(_most_probable(asked))
                laws.append(torch.nn.functional.one_hot(ids[-1], law.shape[-1]).to(law.dtype))
            else:
                ids.append(choices.draw(asked, stream=Stream.DRAFT, at=before + parents * number + child))
                laws.append(law)
            if self.tree.drafts is not Drafts.WITH_REPLACEMENT:
                left = left.scatter(-1, ids[-1][..., None], 0)
        first = before - law.shape[1] if levels else -1  # place of the first parent; the context is -1
        return _Level(
            token_ids=torch.stack(ids, 2).flatten(1),
            drafted=torch.stack(drafted, 2).flatten(1),
            laws=torch.stack(laws, 2).flatten(1, 2),
            parents=(first + parents).repeat_interleave(number),
        )

    def _forget(self, context: Context) -> None:
        """One row a sequence, which holds what was said and nothing that was drafted."""
        num_rows = len(self.session.lengths)
        width = num_rows // len(context.rows)
        if width > 1:
            self.session.select(torch.arange(0, num_rows, width, device=context.lengths.device))
        self.session.rollback(torch.minimum(self.session.lengths, context.lengths))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.session.select(rows)


def _most_probable(law: Float[Tensor, "batch n vocab"]) -> Int[Tensor, "batch n"]:
    """Ties to the lowest id, which `argmax` does not promise."""
    ids = torch.arange(law.shape[-1], device=law.device)
    return torch.where(law == law.amax(-1, keepdim=True), ids, len(ids)).amin(-1)


def _proposal(levels: Sequence[_Level], context: Context, vocab_size: int) -> Proposal:
    """The nodes that were drafted, brought to the left; a parent stays before its children."""
    if not levels:
        nothing = Proposal.point_masses(context.token_ids[:, :0], torch.zeros_like(context.lengths), vocab_size)
        return Proposal(nothing.token_ids, nothing.num_draft_tokens, nothing.draft_probs, nothing.token_ids)
    drafted = torch.cat([level.drafted for level in levels], 1)
    num_nodes = drafted.sum(1)
    order = torch.argsort((~drafted).byte(), dim=1, stable=True)[:, : int(num_nodes.max())]
    there = drafted.gather(1, order)
    parents = torch.cat([level.parents for level in levels]).expand_as(drafted).gather(1, order)
    place_now = drafted.long().cumsum(1) - 1
    moved = torch.where(there & (parents >= 0), place_now.gather(1, parents.clamp(min=0)), -1)
    token_ids = torch.cat([level.token_ids for level in levels], 1).gather(1, order)
    laws = torch.cat([level.laws for level in levels], 1)
    laws = laws.gather(1, order[..., None].expand(-1, -1, vocab_size))
    return Proposal(token_ids, num_nodes, torch.where(there[..., None], laws, 0), moved)
