"""Rules over trees of drafts, all lossless. A chain is a tree whose nodes have one child each.

Note [Walking a tree]: nodes come after their parents, siblings in the order in which they are tried. So one pass over the
places visits every node at the right moment: a node is tried where its parent is the node that was accepted last, and is
passed over otherwise. All rows of a batch walk together, each through its own tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.verification import Proposal, Verification
from specverify.verification.block import continuation

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = [
    "recursive_rejection",
    "recursive_rejection_without_replacement",
    "top_k_children",
    "traversal",
    "tree_parents",
]


def tree_parents(proposal: Proposal) -> Int[Tensor, "batch k"]:
    """The parents of a tree's nodes; of a chain, the places before."""
    if proposal.parents is not None:
        return proposal.parents
    places = torch.arange(proposal.token_ids.shape[1], device=proposal.token_ids.device)
    return (places - 1).expand_as(proposal.token_ids)


def normalised(
    mass: Float[Tensor, "batch vocab"], otherwise: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch vocab"]:
    """Mass divided by its sum; `otherwise` where rounding or an exhausted support leaves none."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), otherwise)


@dataclass
class Walk:
    """Where every row of a batch stands in its tree."""

    node: Int[Tensor, " batch"]
    """The node that was accepted last; -1 is the context."""
    path: list[Int[Tensor, " batch"]]
    """Of each try, the node that it accepted, or -1."""
    law: Float[Tensor, "batch vocab"]
    """What the target still wants at this node, after the children that were rejected."""
    rejected: Bool[Tensor, " batch"]
    """Whether a child of this node was."""

    @staticmethod
    def start(target_probs: Float[Tensor, "batch k_plus_1 vocab"]) -> Walk:
        """At the context."""
        context = torch.full_like(target_probs[:, 0, 0], -1, dtype=torch.int64)
        return Walk(context, [], target_probs[:, 0], context > 0)

    def step(
        self,
        place: int,
        tried: Bool[Tensor, " batch"],
        accepted: Bool[Tensor, " batch"],
        target_probs: Float[Tensor, "batch k_plus_1 vocab"],
        left: Float[Tensor, "batch vocab"],
    ) -> None:
        """Move on to an accepted node; `left` is what the target still wants where it was rejected."""
        refused = tried & ~accepted
        self.node = torch.where(accepted, place, self.node)
        self.path.append(torch.where(accepted, place, -1))
        self.law = torch.where(
            accepted[:, None], target_probs[:, place + 1], torch.where(refused[:, None], left, self.law)
        )
        self.rejected = (self.rejected | refused) & ~accepted

    def end(self, proposal: Proposal, choices: Choices) -> Verification:
        """Draw the target's token at the node where the walk ended."""
        k = proposal.token_ids.shape[1]
        path = torch.stack(self.path, 1) if k else proposal.token_ids
        num_accepted = (path >= 0).sum(-1)
        stream = torch.where(self.rejected, Stream.RESIDUAL, Stream.BONUS)
        drawn = choices.draw(self.law[:, None], stream=stream[:, None], at=num_accepted[:, None])[:, 0]
        return Verification(num_accepted, drawn, in_order(path, num_accepted))


def in_order(path: Int[Tensor, "batch k"], num_accepted: Int[Tensor, " batch"]) -> Int[Tensor, "batch k"]:
    """The accepted nodes first, in their order, -1 after them."""
    places = torch.arange(path.shape[1], device=path.device)
    key = torch.where(path >= 0, path, path.shape[1])
    return torch.where(places < num_accepted[:, None], key.sort(-1).values, -1)


def _recursive(
    proposal: Proposal,
    target_probs: Float[Tensor, "batch k_plus_1 vocab"],
    choices: Choices,
    law_of: Callable[[int, Float[Tensor, "batch vocab"]], Float[Tensor, "batch vocab"]],
) -> Verification:
    """Chain rejection of one sibling after the other, against what the target still wants after those before."""
    parents, walk = tree_parents(proposal), Walk.start(target_probs)
    rejected_ids = torch.zeros_like(target_probs[:, 0])
    for place in range(proposal.token_ids.shape[1]):
        tried = proposal.drafted[:, place] & (parents[:, place] == walk.node)
        x = proposal.token_ids[:, place : place + 1]
        q = law_of(place, rejected_ids)
        p_x, q_x = walk.law.gather(-1, x)[:, 0], q.gather(-1, x)[:, 0]
        ratio = torch.where(p_x >= q_x, (p_x > 0).double(), p_x / q_x)
        at = torch.tensor([place], device=x.device)
        accepted = tried & choices.accept(torch.where(tried, ratio, 0)[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        left = normalised((walk.law - q).clamp(min=0), walk.law)
        walk.step(place, tried, accepted, target_probs, left)
        here = torch.where((tried & ~accepted)[:, None], rejected_ids.scatter(-1, x, 1), rejected_ids)
        rejected_ids = torch.where(accepted[:, None], 0, here)
    return walk.end(proposal, choices)


def recursive_rejection(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Independent children: accept x_j with min(1, p_j / q), then p_{j+1} = norm [p_j - q]+ [SpecInfer2024, Alg. 2]."""
    return _recursive(proposal, target_probs, choices, lambda place, _: proposal.draft_probs[:, place])


def recursive_rejection_without_replacement(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Children drawn one by one without the earlier ones: q is renormalised after each rejection [Sequoia2024, RSD2024]."""

    def without_rejected(place: int, rejected: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        law = proposal.draft_probs[:, place]
        return normalised(law * (1 - rejected), law)

    return _recursive(proposal, target_probs, choices, without_rejected)


def top_k_children(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """Children that were chosen, not drawn, are point masses: accept x_j with p_j(x_j), then p_{j+1} = norm(p_j without x_j)."""

    def point_mass(place: int, _: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        return torch.zeros_like(target_probs[:, 0]).scatter(-1, proposal.token_ids[:, place : place + 1], 1)

    return _recursive(proposal, target_probs, choices, point_mass)


# ------------------------------------------------------------------------------------------------ leaf to root


def traversal(
    proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"], choices: Choices
) -> Verification:
    """From the first leaf to the root: accept its whole path with P(leaf), or delete it and try again [Traversal2025, Alg. 2].

    P along a path is that of block verification. When a leaf x is deleted, its parent's target law becomes
    norm [P M - S]+, its weight Z / (Z + 1 - P), and its draft law loses x; the parent may then be a leaf itself. On a chain
    this is block verification, with the same decisions.
    """
    tree = _Traversal(proposal, target_probs)
    for _ in range(proposal.token_ids.shape[1]):
        leaf, weight, weight_above = tree.first_leaf()
        here = tree.open & (leaf >= 0)
        at = leaf.clamp(min=0)[:, None]
        falls = choices.accept(torch.where(here, weight, 0)[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        tree.close(here & falls, leaf)
        tree.delete(here & ~falls, leaf, weight_above)
    return tree.end(choices)


class _Traversal:
    """Laws and weights of every entry of a batch of trees; entry 0 is the context, entry i + 1 is node i."""

    def __init__(self, proposal: Proposal, target_probs: Float[Tensor, "batch k_plus_1 vocab"]) -> None:
        batch, k = proposal.token_ids.shape
        self._proposal, self._parents = proposal, tree_parents(proposal)
        self._rows = torch.arange(batch, device=target_probs.device)
        self._target = target_probs.clone()  # M
        self._draft = torch.zeros_like(target_probs)  # S, by the entry whose children it drew
        for place in range(k - 1, -1, -1):
            drafted = proposal.drafted[:, place, None]
            above = self._parents[:, place] + 1
            law = torch.where(drafted, proposal.draft_probs[:, place], self._draft[self._rows, above])
            self._draft[self._rows, above] = law
        self._weight = target_probs.new_full((batch, k + 1), torch.nan)  # set where a child was deleted
        self._left = proposal.drafted.clone()
        self.open = torch.ones_like(self._rows, dtype=torch.bool)
        self._end = torch.full_like(self._rows, -1)

    def first_leaf(self) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Down the first children that are left: the leaf (-1: only the context is left), its weight, and its parent's."""
        node, weight = torch.full_like(self._rows, -1), torch.ones_like(self._weight[:, 0])
        above = weight
        for _ in range(self._proposal.token_ids.shape[1]):
            children = self._left & (self._parents == node[:, None])
            child = children.long().argmax(-1)
            x = self._proposal.token_ids[self._rows, child]
            wanted, drawn = (laws[self._rows, node + 1, x] for laws in (self._target, self._draft))
            along = (weight * torch.where(drawn > 0, wanted / drawn, 0)).clamp(max=1)
            own = self._weight[self._rows, child + 1]
            goes_on = children.any(-1)
            above = torch.where(goes_on, weight, above)
            weight = torch.where(goes_on, torch.where(own.isnan(), along, own), weight)
            node = torch.where(goes_on, child, node)
        return node, weight, above

    def close(self, rows: Bool[Tensor, " batch"], leaf: Int[Tensor, " batch"]) -> None:
        """The path to the leaf is accepted."""
        self._end = torch.where(rows, leaf, self._end)
        self.open = self.open & ~rows

    def delete(
        self, rows: Bool[Tensor, " batch"], leaf: Int[Tensor, " batch"], weight: Float[Tensor, " batch"]
    ) -> None:
        """The leaf goes; what the target wants after its parent, whose weight is given, is what the leaf didn't give."""
        at = leaf.clamp(min=0)
        above = self._parents[self._rows, at] + 1
        x = self._proposal.token_ids[self._rows, at]
        target, draft = self._target[self._rows, above], self._draft[self._rows, above]
        mass = (weight[:, None] * target - draft).clamp(min=0)
        smaller = normalised(draft.scatter(-1, x[:, None], 0), torch.zeros_like(draft))
        changed = rows[:, None]
        self._target[self._rows, above] = torch.where(changed, normalised(mass, target), target)
        self._draft[self._rows, above] = torch.where(changed, smaller, draft)
        self._weight[self._rows, above] = torch.where(
            rows, continuation(mass.sum(-1), weight), self._weight[self._rows, above]
        )
        self._left[self._rows, at] &= ~rows

    def end(self, choices: Choices) -> Verification:
        """Draw the target's token where the accepted path ends; at the context where no leaf was."""
        path = torch.full_like(self._proposal.token_ids, -1)
        node = self._end
        for _ in range(path.shape[1]):
            at = node.clamp(min=0)[:, None]
            path = path.scatter(1, at, torch.where(node >= 0, node, path.gather(1, at)[:, 0])[:, None])
            node = torch.where(node >= 0, self._parents[self._rows, node.clamp(min=0)], -1)
        num_accepted = (path >= 0).sum(-1)
        entry = self._end + 1
        lost = ~self._weight[self._rows, entry].isnan()
        stream = torch.where(lost, Stream.RESIDUAL, Stream.BONUS)
        law = self._target[self._rows, entry]
        drawn = choices.draw(law[:, None], stream=stream[:, None], at=num_accepted[:, None])[:, 0]
        return Verification(num_accepted, drawn, in_order(path, num_accepted))
