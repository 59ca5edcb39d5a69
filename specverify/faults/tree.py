"""Wrong rules for several drafts: what is subtracted, renormalised or weighted after a rejected sibling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.drafting import DraftModel, drafter_for
from specverify.errors import PlanError
from specverify.faults.fault import Fault
from specverify.verification.block import block_verification
from specverify.verification.chain import acceptance_probs
from specverify.verification.rules import Drafts
from specverify.verification.tree import Walk, normalised, recursive_rejection, tree_parents

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specverify.choices import Choices
    from specverify.decoding import Decoder
    from specverify.verification import Proposal, Rule, Verification

__all__ = ["TREE_FAULTS"]

_BRANCHING = (2, 1)


def _over(drafts: Drafts, rule: Rule) -> Callable[[Decoder], Decoder]:
    """The decoder with trees of such drafts and a wrong rule. Raises `PlanError` where drafts come from no model."""

    def apply(decoder: Decoder) -> Decoder:
        if not isinstance(decoder.drafter, DraftModel):
            msg = "a fault of a tree rule needs a draft model under --rule chain; leave out other rules and drafters"
            raise PlanError(msg)
        drafter = drafter_for(drafts, decoder.drafter.model, decoder.target.vocab_size, branching=_BRANCHING)
        return replace(decoder, drafter=drafter, drafts=drafts, rule=rule)

    return apply


def _siblings_against_the_same_target(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """Every sibling is held against the target's own law; what the earlier ones took is subtracted at the end only."""
    parents, walk = tree_parents(proposal), Walk.start(target_probs)
    rows = torch.arange(len(target_probs), device=target_probs.device)
    for place in range(proposal.token_ids.shape[1]):
        tried = proposal.drafted[:, place] & (parents[:, place] == walk.node)
        p, q, x = target_probs[rows, walk.node + 1], proposal.draft_probs[:, place], proposal.token_ids[:, place, None]
        ratio = torch.where(tried, (p / q).nan_to_num(0).gather(-1, x)[:, 0].clamp(max=1), 0)
        at = torch.tensor([place], device=x.device)
        accepted = tried & choices.accept(ratio[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        walk.step(place, tried, accepted, target_probs, normalised((walk.law - q).clamp(min=0), walk.law))
    return walk.end(proposal, choices)


def _softmax_of_chosen(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """Children that were chosen as the most probable are accepted as if they had been drawn from the target's shape."""
    flat = replace(proposal, draft_probs=(proposal.draft_probs + target_probs[:, :1]) / 2)
    return recursive_rejection(flat, target_probs, choices)


def _one_threshold(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """Several independent siblings, each accepted as if it were the only one, and one subtraction for all."""
    parents, walk = tree_parents(proposal), Walk.start(target_probs)
    rows = torch.arange(len(target_probs), device=target_probs.device)
    for place in range(proposal.token_ids.shape[1]):
        tried = proposal.drafted[:, place] & (parents[:, place] == walk.node)
        p, q, x = target_probs[rows, walk.node + 1], proposal.draft_probs[:, place], proposal.token_ids[:, place, None]
        ratio = torch.where(tried, (p / q).nan_to_num(0).gather(-1, x)[:, 0].clamp(max=1), 0)
        at = torch.tensor([place], device=x.device)
        accepted = tried & choices.accept(ratio[:, None], stream=Stream.ACCEPT, at=at)[:, 0]
        walk.step(place, tried, accepted, target_probs, normalised((p - q).clamp(min=0), p))
    return walk.end(proposal, choices)


def _sibling_rows(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """The row after an accepted node is read one node too late, as from a sibling's slot."""
    late = target_probs.roll(-1, 1)
    late[:, 0] = target_probs[:, 0]
    return recursive_rejection(proposal, late, choices)


def _chain_weights(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """Block verification whose replacement forgets the weight of the block: [p - q]+ in place of [P p - q]+."""
    kept = block_verification(proposal, target_probs, choices)
    rows = torch.arange(len(target_probs), device=target_probs.device)
    drafts = torch.nn.functional.pad(proposal.draft_probs, (0, 0, 0, 1))
    at = kept.num_accepted_tokens
    p, q = target_probs[rows, at], drafts[rows, at]
    law = normalised((p - q).clamp(min=0), p)
    drawn = choices.draw(law[:, None], stream=Stream.TARGET, at=at[:, None])[:, 0]
    return replace(kept, next_token_ids=drawn)


def _coins_of_chain(proposal: Proposal, target_probs: Tensor, choices: Choices) -> Verification:
    """Block verification that keeps the longest prefix whose own *ratio* falls."""
    places = torch.arange(proposal.token_ids.shape[1], device=target_probs.device)
    ratios = torch.where(proposal.drafted, acceptance_probs(proposal, target_probs), 0)
    falls = choices.accept(ratios, stream=Stream.ACCEPT, at=places)
    longest = (falls * (places + 1)).amax(-1) if len(places) else torch.zeros_like(proposal.num_draft_tokens)
    rows = torch.arange(len(target_probs), device=target_probs.device)
    drafts = torch.nn.functional.pad(proposal.draft_probs, (0, 0, 0, 1))
    p, q = target_probs[rows, longest], drafts[rows, longest]
    drawn = choices.draw(normalised((p - q).clamp(min=0), p)[:, None], stream=Stream.RESIDUAL, at=longest[:, None])[
        :, 0
    ]
    return replace(
        block_verification(proposal, target_probs, choices), num_accepted_tokens=longest, next_token_ids=drawn
    )


TREE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="siblings-same-target",
        stands_for="each sibling is held against the target itself, not against what the rejected ones left",
        caught_by=("exactness",),
        apply=_over(Drafts.WITH_REPLACEMENT, _siblings_against_the_same_target),
    ),
    Fault(
        name="siblings-raw-draft-law",
        stands_for="children drawn without replacement are verified with the draft law that still holds the earlier ones",
        caught_by=("exactness",),
        apply=_over(Drafts.WITHOUT_REPLACEMENT, recursive_rejection),
    ),
    Fault(
        name="siblings-drawn-as-chosen",
        stands_for="sampled children are verified as point masses, after a draw that was reported as a choice",
        caught_by=("exactness",),
        apply=_over(Drafts.TOP_K, _softmax_of_chosen),
    ),
    Fault(
        name="siblings-one-subtraction",
        stands_for="several siblings are rejected and the draft's law is subtracted once",
        caught_by=("exactness",),
        apply=_over(Drafts.WITH_REPLACEMENT, _one_threshold),
    ),
    Fault(
        name="tree-row-of-sibling",
        stands_for="the target's row after a node is read from the next node's slot",
        caught_by=("exactness",),
        apply=_over(Drafts.WITH_REPLACEMENT, _sibling_rows),
    ),
    Fault(
        name="block-residual-unweighted",
        stands_for="block verification replaces from [p - q]+ instead of [P p - q]+",
        caught_by=("exactness",),
        apply=lambda decoder: replace(decoder, rule=_chain_weights),
    ),
    Fault(
        name="block-coins-of-chain",
        stands_for="block verification with token-wise ratios: an accepted draft after a rejected one is kept",
        caught_by=("exactness", "greedy"),
        apply=lambda decoder: replace(decoder, rule=_coins_of_chain),
    ),
)
"""Rules for trees and blocks with one line wrong."""
