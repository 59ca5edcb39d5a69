"""Block verification beyond its law, which `test_exact_laws` proves: drafts that can't be, and where its noise comes from."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.scripted import Scripted
from specverify.verification import Proposal
from specverify.verification.block import block_verification

P = torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)


@pytest.mark.parametrize("impossible", [0, 1])
def test_a_draft_that_its_own_law_excludes_is_not_kept(impossible: int):
    """Nor is anything behind it, even at u = 0: its weight is 0, whatever p is."""
    q = torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    q[0, impossible] = torch.tensor([0.0, 1.0])
    found = block_verification(Proposal(torch.tensor([[0, 0]]), torch.tensor([2]), q), P, Scripted())
    assert int(found.num_accepted_tokens) <= impossible


@pytest.mark.parametrize(("accept", "num_accepted", "stream"), [(0.0, 2, Stream.BONUS), (0.99, 0, Stream.RESIDUAL)])
def test_what_follows_is_drawn_from_the_stream_of_its_place(accept: float, num_accepted: int, stream: Stream):
    """A bonus after a whole block, a replacement after a part: the noise of one is never the other's."""
    q = torch.tensor([[[0.9, 0.1], [0.9, 0.1]]], dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0, 0]]), torch.tensor([2]), q)
    for uniform in (0.01, 0.99):
        scripted = Scripted({Stream.ACCEPT: accept, stream: uniform})
        found = block_verification(proposal, P, scripted)
        assert int(found.num_accepted_tokens) == num_accepted
        if stream is Stream.BONUS:
            assert int(found.next_token_ids) == (uniform > 0.5)
