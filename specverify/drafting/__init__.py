"""Where proposals come from. A drafter opens a `Drafting` for a batch; that proposes, and forgets rows that leave.

Every proposal carries the law that its ids were really drawn from: a point mass for what is deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.drafting.drafter import Drafter, Drafting, open_shared, pick
from specverify.drafting.model import DraftModel
from specverify.drafting.scripted import NoDraft, PromptLookup, ScriptedDrafts
from specverify.drafting.text import TextDraft
from specverify.drafting.tree import DEFAULT_BRANCHING, TREES, DraftTree, branching_of
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.models import LanguageModel

__all__ = [
    "DEFAULT_BRANCHING",
    "TREES",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Drafting",
    "NoDraft",
    "PromptLookup",
    "ScriptedDrafts",
    "TextDraft",
    "branching_of",
    "drafter_for",
    "open_shared",
    "pick",
]


def drafter_for(
    drafts: Drafts, model: LanguageModel, vocab_size: int, *, branching: Sequence[int] = DEFAULT_BRANCHING
) -> DraftModel | DraftTree:
    """The drafter whose proposals a rule with these `drafts` is right for; `branching` is the shape of its trees."""
    if drafts in TREES:
        return DraftTree(model, vocab_size, branching=tuple(branching), drafts=drafts)
    return DraftModel(model, vocab_size, coupled=drafts is Drafts.COUPLED)
