"""The rules by name, and how the drafts that each is right for are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from specverify.verification.chain import chain_rejection, greedy, sample_and_match

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


RULES: dict[str, NamedRule] = {
    named.name: named
    for named in (
        NamedRule("chain", chain_rejection),
        NamedRule("match", sample_and_match),
        NamedRule("greedy", greedy),
    )
}
"""In the order in which they are listed."""
