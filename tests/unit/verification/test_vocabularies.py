"""Two vocabularies: a draft law over shared ids stays lossless, and a draft by way of its text proposes what is stable."""

from __future__ import annotations

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.enumerate import every_path
from specverify.errors import PairError
from specverify.models.table import random_table
from specverify.verification import Proposal
from specverify.verification.chain import chain_rejection
from specverify.verification.vocabularies import intersected, round_trip, shared_ids, target_ids_from_offsets

TARGET_IDS = torch.tensor([2, -1, 0, 3])
"""Of the draft's ids. Its id 1 is no id of the target, and the target's id 1 is none of the draft's."""


def emitted(p, drawn, reported):
    """The law of the first token of a one-draft step of chain rejection."""
    law = torch.zeros_like(p)

    def program(choices):
        paths = len(choices.records)
        ids = choices.draw(drawn.expand(paths, 1, -1), stream=Stream.DRAFT, at=torch.tensor([0]))
        told = Proposal(ids, torch.ones(paths, dtype=torch.int64), reported.expand(paths, 1, -1))
        verification = chain_rejection(told, p.expand(paths, 2, -1), choices)
        return torch.where(verification.num_accepted_tokens > 0, ids[:, 0], verification.next_token_ids)

    for outcomes, weights in every_path(program):
        law.index_add_(0, outcomes, weights)
    return law


@pytest.mark.parametrize("seed", range(6))
def test_drafts_over_the_shared_ids_are_lossless(seed):
    """Drawn from q' and reported as q'; q itself on the shared ids, reported for what was drawn from q', is lossy."""
    p, q = random_table(4, 1, seed=seed).levels[1].exp()[:2]
    law = intersected(q, TARGET_IDS, 4)
    kept = q[TARGET_IDS >= 0]
    assert law[TARGET_IDS[TARGET_IDS >= 0]].tolist() == pytest.approx((kept / kept.sum()).tolist(), abs=1e-15)
    assert float(law[1]) == 0
    assert float((emitted(p, law, law) - p).abs().max()) < 1e-12
    assert float((emitted(p, law, law * kept.sum()) - p).abs().max()) > 1e-3


def test_a_draft_without_mass_on_shared_ids_says_any_of_them():
    """Such as a law cut to its one most probable id; still a law, and lossless, since drafts are drawn from it."""
    law = intersected(torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0]]), TARGET_IDS, 5)
    assert law.tolist() == [[1 / 3, 0, 1 / 3, 1 / 3, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([-1, -1], "^no id of the draft is one of the"),
        ([1, 1], "^two ids of the draft are one of the"),
        ([0, 0], "^two ids"),
    ],
)
def test_a_map_that_is_none_is_refused(ids, why):
    """Nothing shared, or one id of the target for two of the draft's, whose law would be lost."""
    with pytest.raises(PairError, match=why):
        intersected(torch.tensor([0.5, 0.5]), torch.tensor(ids), 3)


def test_id_0_is_an_id_like_any_other():
    """Shared alone, it is what is drafted."""
    assert intersected(torch.tensor([0.3, 0.7]), torch.tensor([-1, 0]), 3).tolist() == [1, 0, 0]


def test_a_reduced_vocabulary_is_a_map_of_offsets():
    """EAGLE-3's `d2t`: what each of the draft's ids is moved by."""
    assert target_ids_from_offsets(torch.tensor([0, 0, 5, 7])).tolist() == [0, 1, 7, 10]


def test_ids_are_shared_by_their_strings():
    """Ids differ, order differs, padding rows of the draft have no string."""
    assert shared_ids({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 5, "d": 1}, 4).tolist() == [5, -1, 0, -1]
    assert shared_ids({"a": 0, "c": 1}, {"c": 0, "a": 5}, 1).tolist() == [5], (
        "an id without an output row is not drafted"
    )


# ---------------------------------------------------------------------------------------------------------- round trip

TOKENS = ("a", "b", "c", "ab", "abc", "\N{REPLACEMENT CHARACTER}")


def encode(text):
    """The target's tokenizer: the longest token that fits."""
    ids = []
    while text:
        token = max((token for token in TOKENS if text.startswith(token)), key=len)
        ids.append(TOKENS.index(token))
        text = text[len(token) :]
    return ids


def spell(ids):
    """Its inverse."""
    return "".join(TOKENS[token] for token in ids)


@pytest.mark.parametrize(
    ("said", "draft", "proposed"),
    [
        ("c", "cab", "c"),  # the last id, ab, might yet become abc
        ("c", "abcc", "abc"),
        ("c a", "bc", "b"),  # a and bc would merge into abc, so bc is encoded by itself
        ("c a", "bcc", "b c"),
        ("", "ccc", "c c"),
        ("a b", "cc", "c"),  # `a b` is said otherwise than the target would encode it; only b is looked at
        ("c", "", ""),
        ("c", "c", ""),
        ("c", "cca\N{REPLACEMENT CHARACTER}", "c c"),  # part of a character is no text
    ],
)
def test_a_draft_by_its_text(said, draft, proposed):
    """The part of the encoding that more text would not change."""
    said_ids = [TOKENS.index(token) for token in said.split()]
    found = round_trip(list(draft), said=said_ids, decode_draft="".join, decode_target=spell, encode_target=encode)
    assert [TOKENS[token] for token in found] == proposed.split()


def test_no_more_is_looked_at_than_is_asked_for():
    """The tokenizer sees a window, so that a long text costs no more than a short one."""
    seen = []

    def encoded(text):
        seen.append(text)
        return encode(text)

    round_trip(
        ["c", "c"], said=[0, 2] * 50, decode_draft="".join, decode_target=spell, encode_target=encoded, look_behind=4
    )
    assert seen == ["acaccc"]


def test_the_tail_is_shortened_one_id_at_a_time():
    """From the first id on, and by 8 ids unless said otherwise: what the tokenizer is asked, in order."""
    seen = []

    def encoded(text):
        seen.append(text)
        return encode(text)

    asked = {"decode_draft": "".join, "decode_target": spell, "encode_target": encoded}
    round_trip(["c"], said=[0, 1, 2], **asked)  # a, b, c would be said as abc
    round_trip(["c"], said=[2] * 9, **asked)
    assert seen == ["abcc", "bcc", "c" * 9]
