"""Exact laws of one step of a rule over trees: every path of drafting and verifying, on tables over the whole prefix.

Prefixes are numbered as in a heap: the context is 0, and the prefix n followed by token x is n V + 1 + x. So the laws after
all prefixes are the rows of one matrix, and a tree is a list of prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.choices.enumerate import every_path
from specverify.models.table import TableModel, random_table
from specverify.verification import Proposal, Verification
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.choices import Choices
    from specverify.verification import Rule

__all__ = ["CHAIN", "Pair", "Step", "chain_of", "draft_tree", "laws_after_step", "pairs", "steps", "tree_of"]

VOCAB_SIZE = 3
DEPTH = 3
"""The longest chain or path; tables have a level more."""


@dataclass(frozen=True)
class Racing:
    """Choices that answer a race as a draw: with a fork of its own, however often a position is raced."""

    inner: Choices

    def accept(self, prob, **asked):
        return self.inner.accept(prob, **asked)

    def draw(self, probs, **asked):
        return self.inner.draw(probs, **asked)

    def race(self, probs, *, at, guesses=None):
        return self.inner.draw(probs, stream=Stream.TARGET, at=at, guesses=guesses)


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Pair:
    """Laws after every prefix, of the target and of the draft."""

    name: str
    target: torch.Tensor
    draft: torch.Tensor


def _heap(table: TableModel) -> torch.Tensor:
    return torch.cat([level.exp() for level in table.levels])


def _table(seed: int, **changed) -> torch.Tensor:
    return _heap(random_table(VOCAB_SIZE, DEPTH, seed=seed, **changed))


def _only(laws: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    kept = torch.zeros_like(laws)
    kept[:, ids] = laws[:, ids]
    return kept / kept.sum(-1, keepdim=True)


def pairs() -> list[Pair]:
    """Random, sparse, tied, disjoint, nearly one-hot and equal laws; no two contexts have the same law."""
    ties = torch.tensor([[2.0, 2, 1], [1, 2, 2], [1, 1, 1], [1, 0, 1], [2, 1, 1]], dtype=torch.float64)
    tied = ties[torch.randint(5, (2, len(_table(0))), generator=torch.Generator().manual_seed(5))]
    tied = tied / tied.sum(-1, keepdim=True)
    return [
        Pair("random", _table(0), _table(1)),
        Pair("other", _table(2), _table(3)),
        Pair("sparse", _table(4, zeros=0.4), _table(5, zeros=0.4)),
        Pair("ties", tied[0], tied[1]),
        Pair("disjoint", _only(_table(6), [0, 1]), _only(_table(7), [2])),
        Pair("nearly one-hot", _table(8, sharpness=9.0), _table(9, sharpness=9.0)),
        Pair("equal", _table(10), _table(10)),
        Pair("equal and sparse", _table(11, zeros=0.4), _table(11, zeros=0.4)),
    ]


# -------------------------------------------------------------------------------------------------------------- trees

Shape = tuple[int, ...]
"""The place of each node's parent; -1 is the context."""


def tree_of(*branching: int) -> Shape:
    """The complete tree with so many children a level, level by level."""
    parents, level = [], [-1]
    for number in branching:
        first = len(parents)
        parents += [node for node in level for _ in range(number)]
        level = list(range(first, len(parents)))
    return tuple(parents)


def chain_of(length: int) -> Shape:
    """Each node after the one before."""
    return tuple(range(-1, length - 1))


CHAIN = "chain"
"""How a proposal without `parents` is asked for."""


def draft_tree(
    pair: Pair, parents: torch.Tensor, there: torch.Tensor, choices: Choices, drafts: Drafts
) -> tuple[Proposal, torch.Tensor]:
    """A tree for each row, drawn node by node in the stated way, and the prefix of the context and of each node.

    A node is left out where the support is used up, and so are its descendants; the others move up to take its place.
    """
    batch, k = parents.shape
    rows = torch.arange(batch)
    prefixes = torch.zeros(batch, k + 1, dtype=torch.int64)
    used = torch.zeros(batch, k + 1, VOCAB_SIZE, dtype=torch.bool)  # ids of the children of the context and each node
    drafted = torch.ones(batch, k + 1, dtype=torch.bool)
    laws = []
    for place in range(k):
        above = parents[:, place] + 1
        law = pair.draft[prefixes[rows, above].clamp(max=len(pair.draft) - 1)]
        left = law if drafts in (Drafts.WITH_REPLACEMENT, Drafts.CHAIN) else law.masked_fill(used[rows, above], 0)
        drafted[:, place + 1] = there[:, place] & drafted[rows, above] & (left.sum(-1) > 0)
        sure = torch.eye(1, VOCAB_SIZE, dtype=torch.float64)
        left = torch.where(drafted[:, place + 1, None], left, sure)
        at = torch.tensor([place])
        if drafts is Drafts.COUPLED:
            x = choices.race(torch.where(drafted[:, place + 1, None], law, sure)[:, None], at=at)[:, 0]
        elif drafts is Drafts.TOP_K:
            x = (left == left.amax(-1, keepdim=True)).byte().argmax(-1)
            law = torch.nn.functional.one_hot(x, VOCAB_SIZE).double()
        else:
            x = choices.draw(left[:, None], stream=Stream.DRAFT, at=at)[:, 0]
        used[rows, above, x] = True
        prefixes[:, place + 1] = prefixes[rows, above] * VOCAB_SIZE + 1 + x
        laws.append(law)
    return _compacted(torch.stack(laws, 1), drafted[:, 1:], parents, prefixes)


def _compacted(
    laws: torch.Tensor, drafted: torch.Tensor, parents: torch.Tensor, prefixes: torch.Tensor
) -> tuple[Proposal, torch.Tensor]:
    order = torch.argsort((~drafted).byte(), dim=1, stable=True)
    there = drafted.gather(1, order)
    place_now = torch.nn.functional.pad(drafted.long().cumsum(1) - 1, (1, 0), value=-1)
    moved = place_now.gather(1, parents.gather(1, order) + 1)
    laws = torch.where(there[..., None], laws.gather(1, order[..., None].expand_as(laws)), 0)
    prefixes = torch.cat((prefixes[:, :1], prefixes[:, 1:].gather(1, order)), 1)
    ids = torch.where(there, (prefixes[:, 1:] - 1) % VOCAB_SIZE, 0)
    return Proposal(ids, drafted.sum(1), laws, torch.where(there, moved, -1)), prefixes


# -------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    """What one path of drafting and verifying does, for many paths at once."""

    shape: torch.Tensor
    """Which of the shapes was drafted."""
    prefix: torch.Tensor
    """The accepted tokens, as a prefix."""
    emitted: torch.Tensor
    """The accepted tokens and the one after them."""
    num_accepted: torch.Tensor
    weight: torch.Tensor
    """Given the shape."""


def steps(rule: Rule, pair: Pair, shapes: Sequence[Shape], drafts: Drafts, *, as_chain: bool = False) -> list[Step]:
    """Every path. Which shape a row drafts is the first thing drawn, so that the trees of a batch differ by row."""
    k = max(map(len, shapes))
    padded = torch.tensor([[*shape, *[-1] * (k - len(shape))] for shape in shapes])
    lengths = torch.tensor([len(shape) for shape in shapes])
    found: list[Step] = []

    def program(choices) -> torch.Tensor:
        batch = len(choices.records)
        even = torch.ones(batch, 1, len(shapes), dtype=torch.float64)
        shape = choices.draw(even, stream=Stream.JITTER, at=torch.tensor([0]))[:, 0]
        racing = Racing(choices)
        there = torch.arange(k) < lengths[shape, None]
        proposal, prefixes = draft_tree(pair, padded[shape], there, racing, drafts)
        if as_chain:
            proposal = Proposal(proposal.token_ids, proposal.num_draft_tokens, proposal.draft_probs)
        target_probs = pair.target[prefixes.clamp(max=len(pair.target) - 1)]
        verification = rule(proposal, target_probs, racing)
        last = _last_accepted(proposal, verification)
        prefix = prefixes.gather(1, last[:, None] + 1)[:, 0]
        emitted = prefix * VOCAB_SIZE + 1 + verification.next_token_ids
        return torch.stack((shape, prefix, emitted, verification.num_accepted_tokens), 1)

    for outcomes, weight in every_path(program):
        found.append(Step(*outcomes.unbind(1), weight * len(shapes)))
    return found


def _last_accepted(proposal: Proposal, verification: Verification) -> torch.Tensor:
    """The place of the last accepted node; that the nodes before it are its ancestors is held against the tree."""
    count, nodes = verification.num_accepted_tokens, verification.accepted_nodes
    assert bool((count <= proposal.num_draft_tokens).all())
    if nodes is None:
        assert proposal.parents is None
        return count - 1
    parents = torch.arange(nodes.shape[1]).expand_as(nodes) - 1 if proposal.parents is None else proposal.parents
    on_path = torch.arange(nodes.shape[1]) < count[:, None]
    above = torch.nn.functional.pad(nodes, (1, 0), value=-1)[:, :-1]
    assert torch.equal(on_path, nodes >= 0)
    assert bool((nodes < proposal.num_draft_tokens[:, None]).all())
    assert bool((~on_path | (parents.gather(1, nodes.clamp(min=0)) == above)).all())
    if nodes.shape[1] == 0:
        return count - 1
    return torch.where(count > 0, nodes.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], -1)


def laws_after_step(found: list[Step], pair: Pair, num_shapes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The law of the first DEPTH + 1 tokens for each shape, and the target's: what a step emits, then the target alone."""
    size = VOCAB_SIZE ** (DEPTH + 1)
    mass = torch.zeros(num_shapes + 1, len(pair.target) + size, dtype=torch.float64)
    mass[num_shapes, 0] = 1  # nothing emitted yet: the target alone
    for step in found:
        mass.index_put_((step.shape, step.emitted), step.weight, accumulate=True)
    for prefix, law in enumerate(pair.target):
        first = prefix * VOCAB_SIZE + 1
        mass[:, first : first + VOCAB_SIZE] += mass[:, prefix, None] * law
    return mass[:-1, -size:], mass[-1, -size:]
