"""The rules by name, and how the drafts that each is right for are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from specverify.verification.block import block_verification
from specverify.verification.chain import chain_rejection, greedy, sample_and_match
from specverify.verification.coupling import gumbel_coupling
from specverify.verification.k_sequence import k_sequence
from specverify.verification.lossy import LOSSY
from specverify.verification.tree import (
    recursive_rejection,
    recursive_rejection_without_replacement,
    top_k_children,
    traversal,
)

if TYPE_CHECKING:
    from specverify.verification import Rule

__all__ = ["RULES", "Drafts", "NamedRule"]


class Drafts(StrEnum):
    """How a draft model draws what a rule verifies."""

    CHAIN = "one after the other"
    COUPLED = "one after the other, by the race that the target's own draw will run"
    WITH_REPLACEMENT = "children of a node independently of each other"
    WITHOUT_REPLACEMENT = "children of a node one by one, each from the law without the earlier ones"
    TOP_K = "the most probable children of a node, as point masses"


@dataclass(frozen=True)
class NamedRule:
    """A rule that `--rule` names."""

    name: str
    rule: Rule
    drafts: Drafts = Drafts.CHAIN
    lossless: bool = True
    """Of `greedy`: at temperature 0, the only one for which it is meant."""


RULES: dict[str, NamedRule] = {
    named.name: named
    for named in (
        NamedRule("chain", chain_rejection),
        NamedRule("match", sample_and_match),
        NamedRule("greedy", greedy),
        NamedRule("gumbel", gumbel_coupling, Drafts.COUPLED),
        NamedRule("block", block_verification),
        NamedRule("recursive", recursive_rejection, Drafts.WITH_REPLACEMENT),
        NamedRule("recursive-without-replacement", recursive_rejection_without_replacement, Drafts.WITHOUT_REPLACEMENT),
        NamedRule("top-k-children", top_k_children, Drafts.TOP_K),
        NamedRule("k-sequence", k_sequence, Drafts.WITH_REPLACEMENT),
        NamedRule("traversal", traversal, Drafts.WITHOUT_REPLACEMENT),
        *(NamedRule(name, rule, lossless=False) for name, rule in LOSSY.items()),
    )
}
"""In the order in which they are listed."""
