"""A rule over trees, written for these tests alone: literal, one node at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.verification import Proposal, Rule, Verification
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from specverify.choices import Choices


def recursive(proposal: Proposal, target_probs: torch.Tensor, choices: Choices, *, drafts: Drafts) -> Verification:
    """Try the children of the node that was accepted last, one after the other [SpecInfer2024, Sequoia2024].

    Accept with min(1, p/q); else p becomes norm [p - q]+ and, without replacement, q the law without the child.
    """
    batch, num_nodes = proposal.token_ids.shape
    rows = torch.arange(batch)
    at, depth, p = torch.full((batch,), -1), torch.zeros(batch, dtype=torch.int64), target_probs[:, 0]
    nodes = torch.full((batch, num_nodes), -1)
    gone = torch.zeros_like(p)  # ids of the siblings that were tried
    for node in range(num_nodes):
        ids, q = proposal.token_ids[:, node], proposal.draft_probs[:, node]
        if drafts is Drafts.WITHOUT_REPLACEMENT:
            left = torch.where(gone > 0, 0, q)
            q = left / left.sum(-1, keepdim=True)
        tried = proposal.drafted[:, node] & (proposal.parents[:, node] == at)
        ratio = p[rows, ids] / q[rows, ids]
        prob = torch.where(tried & (p[rows, ids] > 0), ratio.clamp(max=1), 0)
        accepted = choices.accept(prob[:, None], stream=Stream.ACCEPT, at=torch.tensor([node]))[:, 0]
        residual = (p - q).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        rejected = torch.where(mass > 0, residual / mass, p)
        p = torch.where(accepted[:, None], target_probs[:, node + 1], torch.where(tried[:, None], rejected, p))
        tried_ids = gone.scatter(1, ids[:, None], 1)
        gone = torch.where(accepted[:, None], 0, torch.where(tried[:, None], tried_ids, gone))
        at = torch.where(accepted, node, at)
        nodes[accepted, depth[accepted]] = node
        depth = depth + accepted
    next_ids = choices.draw(p[:, None], stream=Stream.RESIDUAL, at=depth[:, None])[:, 0]
    return Verification(depth, next_ids, nodes)


def rule_for(drafts: Drafts) -> Rule:
    """The rule that is right for trees drafted in this way."""
    return partial(recursive, drafts=drafts)
