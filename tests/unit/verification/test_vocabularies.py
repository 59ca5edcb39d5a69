"""Two vocabularies: a draft law over shared ids stays lossless, and a text round trip proposes only what is stable."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import Enumerate, every_path
from specverify.errors import PairError
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection
from specverify.verification.vocabularies import intersected, round_trip

TARGET_IDS = torch.tensor([2, -1, 0, 3])  # of the draft's ids; its id 1 is nobody's, the target's 1 is not drafted


def emitted(p: torch.Tensor, drawn: torch.Tensor, reported: torch.Tensor) -> torch.Tensor:
    """The law of the first token of a one-draft step of chain rejection."""
    law = torch.zeros_like(p)

    def program(choices: Enumerate) -> torch.Tensor:
        paths = len(choices.records)
        ids = choices.draw(drawn.expand(paths, 1, -1), stream=Stream.DRAFT, at=torch.tensor([0]))
        proposal = Proposal(ids, torch.ones(paths, dtype=torch.int64), reported.expand(paths, 1, -1))
        verification = chain_rejection(proposal, p.expand(paths, 2, -1), choices)
        return torch.where(verification.num_accepted_tokens > 0, ids[:, 0], verification.next_token_ids)

    for outcome, weight in every_path(program):
        law.index_add_(0, outcome, weight)
    return law


@pytest.mark.parametrize("seed", range(4))
def test_drafts_over_the_intersection_are_lossless(seed: int):
    """Where they are drawn from q' and q' is what the rule is told; the raw q would not be."""
    p, q = random_table(4, 1, seed=seed).levels[1].exp()[:2]
    law = intersected(q, TARGET_IDS, 4)
    assert law.sum() == pytest.approx(1)
    assert law[1] == 0
    assert float((emitted(p, law, law) - p).abs().sum()) < 1e-12
    raw = torch.zeros(4, dtype=torch.float64).index_add(0, TARGET_IDS[TARGET_IDS >= 0], q[TARGET_IDS >= 0])
    assert float((emitted(p, law, raw) - p).abs().sum()) > 1e-3


def test_no_shared_id_is_one_sentence():
    """Nothing can be drafted then."""
    with pytest.raises(PairError, match="no probability on any id"):
        intersected(torch.tensor([[0.0, 1.0]]), torch.tensor([0, -1]), 3)


def merging(text: str) -> list[int]:
    """A tokenizer that knows `ab` as one token."""
    ids = []
    while text:
        ids.append({"a": 0, "b": 1, "c": 2, "ab": 3}["ab" if text.startswith("ab") else text[0]])
        text = text[2:] if text.startswith("ab") else text[1:]
    return ids


def spelled(ids: list[int]) -> str:
    """Its inverse."""
    return "".join(("a", "b", "c", "ab")[token] for token in ids)


@pytest.mark.parametrize(
    ("said", "draft", "proposed"),
    [([2], "cab", (2,)), ([2], "abcc", (3, 2)), ([2, 0], "bc", ()), ([0], "c", ()), ([], "ccc", (2, 2))],
)
def test_a_round_trip_never_touches_what_was_said(said: list[int], draft: str, proposed: tuple[int, ...]):
    """A merge across the border proposes nothing; the last id might still merge, so it is left out."""
    found = round_trip(list(draft), said=said, decode_draft="".join, decode_target=spelled, encode_target=merging)
    assert found == proposed
