"""strategies: what the properties are held on is what a drafter may really propose, and all kinds of it are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from properties.strategies import law_pairs, laws, proposals

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.verification import Proposal

VOCAB_SIZE = 4
FIND = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])


@given(law=laws(VOCAB_SIZE))
def test_laws_are_distributions(law: torch.Tensor) -> None:
    """Nothing negative, and 1 in all up to rounding."""
    assert bool((law >= 0).all())
    assert float(law.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("trees", [False, True])
@given(data=st.data())
def test_proposals_could_have_been_drawn(trees: bool, data: st.DataObject) -> None:  # noqa: FBT001 - a parametrised case
    """Ids of positive probability; parents before children; siblings that differ and share their law; zero padding."""
    proposal = data.draw(proposals(VOCAB_SIZE, trees=trees))
    assert (proposal.parents is not None) == trees
    assert bool((proposal.draft_probs[~proposal.drafted] == 0).all())
    parents = proposal.parents if trees else torch.arange(proposal.token_ids.shape[1]).expand_as(proposal.token_ids) - 1
    for row, size in enumerate(proposal.num_draft_tokens.tolist()):
        children: dict[int, list[int]] = {}
        for node in range(size):
            parent, law = int(parents[row, node]), proposal.draft_probs[row, node]
            assert -1 <= parent < node
            assert law[proposal.token_ids[row, node]] > 0
            assert all(torch.equal(law, proposal.draft_probs[row, other]) for other in children.get(parent, []))
            children.setdefault(parent, []).append(node)
        for nodes in children.values():
            assert len({int(proposal.token_ids[row, node]) for node in nodes}) == len(nodes)


def has_siblings(proposal: Proposal) -> bool:
    """Whether two nodes follow one below the root."""
    rows = zip(proposal.parents.tolist(), proposal.num_draft_tokens.tolist(), strict=True)
    inner = [[parent for parent in row[:size] if parent >= 0] for row, size in rows]
    return any(len(set(row)) < len(row) for row in inner)


KINDS: dict[str, tuple[st.SearchStrategy, Callable[..., bool]]] = {
    "zeros": (laws(VOCAB_SIZE), lambda law: 0 < int((law == 0).sum()) < VOCAB_SIZE - 1),
    "ties": (laws(VOCAB_SIZE), lambda law: int((law == law.max()).sum()) > 1),
    "one-hot": (laws(VOCAB_SIZE), lambda law: float(law.max()) == 1),
    "nearly one-hot": (laws(VOCAB_SIZE), lambda law: 0.999 < float(law.max()) < 1),
    "p = q": (law_pairs(VOCAB_SIZE), lambda pair: torch.equal(pair.target, pair.draft)),
    "disjoint": (law_pairs(VOCAB_SIZE), lambda pair: float(torch.minimum(pair.target, pair.draft).sum()) == 0),
    "ragged": (proposals(VOCAB_SIZE), lambda proposal: len(set(proposal.num_draft_tokens.tolist())) > 1),
    "nothing drafted": (proposals(VOCAB_SIZE), lambda proposal: proposal.token_ids.shape[1] == 0),
    "siblings": (proposals(VOCAB_SIZE, trees=True), has_siblings),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn(kind: str) -> None:
    """`find` raises `NoSuchExample` where it isn't."""
    strategy, is_there = KINDS[kind]
    assert is_there(find(strategy, is_there, settings=FIND))
