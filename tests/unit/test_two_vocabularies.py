"""A draft with another vocabulary: whatever it shares, reads or says, every rule emits the target's law, exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.choices.philox import Philox
from specverify.context import Context, Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel, TextDraft, drafter_for
from specverify.errors import PairError
from specverify.law import autoregressive_law, decoded_law, total_variation
from specverify.models.table import TableModel, random_table
from specverify.models.translated import TranslatedModel
from specverify.records import DecodeRequest, SamplingParams, count
from specverify.verification import Proposal
from specverify.verification.rules import RULES
from specverify.verification.vocabularies import intersected

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT = 1e-12
TARGET = random_table(3, 9, seed=0)
LOSSLESS = [name for name, named in RULES.items() if named.lossless and name != "greedy"]
MAPS = {
    "one unshared on each side": ([2, -1, 0, -1], [2, 0, 0]),
    "permuted": ([1, 2, 0, -1], [2, 0, 1]),
    "one shared": ([-1, -1, -1, 1], [0, 3, 2]),
}
"""The target's id of each of the draft's four, and the draft's id as which each of the target's three is read."""


def translated(target_ids: Sequence[int], read_as: Sequence[int], seed: int = 1) -> TranslatedModel:
    """A table over four ids, as a draft for a target of three."""
    return TranslatedModel(random_table(4, 7, seed=seed), torch.tensor(target_ids), torch.tensor(read_as))


# ------------------------------------------------------------------------------------------------------ shared ids


@pytest.mark.parametrize("ids", MAPS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_drafts_by_shared_ids_are_lossless(name: str, ids: str) -> None:
    """Under every rule, chains and trees, in whole decodes with an EOS among the ids."""
    named, asked = RULES[name], {"max_new_tokens": 2, "eos_token_ids": (1,)}
    decoder = Decoder(
        target=TARGET,
        drafter=drafter_for(named.drafts, translated(*MAPS[ids]), 3, branching=(2,)),
        rule=named.rule,
        drafts=named.drafts,
        num_speculative_tokens=1,
    )
    assert total_variation(decoded_law(decoder, **asked, merge=False), autoregressive_law(TARGET, **asked)) < EXACT


@dataclass(frozen=True)
class _RawMass:
    """A drafter that draws from q' and reports q, which has mass on ids that the target lacks."""

    inner: DraftModel
    model: TranslatedModel

    def __call__(self, context):
        drafting = self.inner(context)
        return replace(_Raw(drafting, self.model))


@dataclass
class _Raw:
    drafting: object
    model: TranslatedModel

    def propose(self, context, max_tokens):
        proposal = self.drafting.propose(context, max_tokens)
        raw = torch.zeros_like(proposal.draft_probs)
        prefixes = [
            ids[:length] for ids, length in zip(context.token_ids.tolist(), context.lengths.tolist(), strict=True)
        ]
        read = self.model.read_as.tolist()
        for row, prefix in enumerate(prefixes):
            for place in range(int(proposal.num_draft_tokens[row])):
                said = [*prefix, *proposal.token_ids[row, :place].tolist()]
                own = self.model.model.row([read[token] for token in said]).exp()
                shared = self.model.target_ids >= 0
                raw[row, place, self.model.target_ids[shared]] = own[shared]
        return Proposal(proposal.token_ids, proposal.num_draft_tokens, raw)

    def select(self, rows):
        self.drafting.select(rows)


def test_reporting_the_law_before_the_intersection_is_lossy() -> None:
    """What the test above would say of a draft whose reported law is not the one it was drawn from."""
    model = translated(*MAPS["one unshared on each side"])
    decoder = Decoder(target=TARGET, drafter=_RawMass(DraftModel(model, 3), model), num_speculative_tokens=2)
    law = decoded_law(decoder, max_new_tokens=3)
    assert total_variation(law, autoregressive_law(TARGET, max_new_tokens=3)) > 1e-3


@pytest.mark.parametrize("ids", MAPS)
def test_the_law_is_the_intersection_of_both(ids: str) -> None:
    """Q / Z over the shared ids, 0 elsewhere."""
    model = translated(*MAPS[ids])
    own = model.model.logits([[model.read_as[token] for token in (0, 2, 1)]])[0]
    said = model.logits([(0, 2, 1)])[0].softmax(-1)
    assert torch.allclose(said, intersected(own.softmax(-1), model.target_ids, 3), rtol=0, atol=1e-15)


def test_a_session_is_the_models_own() -> None:
    """After a rollback and a selection the logits are those of a fresh pass; what stands after a row's ids isn't read."""
    model = translated(*MAPS["permuted"])
    session = model.open([(0, 1), (2,)])
    session.append(torch.tensor([[2, 10**6], [0, 1]]), torch.tensor([1, 2]))
    session.rollback(torch.tensor([2, 2]))
    session.select(torch.tensor([1, 0, 1]))
    assert session.lengths.tolist() == [2, 2, 2]
    logits = session.append(torch.tensor([[1], [1], [2]]), torch.ones(3, dtype=torch.int64))
    fresh = model.logits([(2, 0, 1), (0, 1, 1), (2, 0, 2)])[:, 2:]
    assert torch.equal(logits, fresh)


def test_ids_of_which_none_is_shared_are_refused() -> None:
    """In one sentence that says what to do."""
    with pytest.raises(PairError, match="--drafter text"):
        translated([-1, -1, -1, -1], [0, 0, 0])


# ------------------------------------------------------------------------------------------------------------ text


class Merging:
    """The target's tokenizer: it knows `ab` as one token."""

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            ids.append(2 if text.startswith("ab") else "ab".index(text[0]))
            text = text.removeprefix("ab") if ids[-1] == 2 else text[1:]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(("a", "b", "ab")[token] for token in token_ids)


class Letters:
    """The draft's: one letter a token."""

    def encode(self, text: str) -> list[int]:
        return ["ab".index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("ab"[token] for token in token_ids)


LETTERS = random_table(2, 14, seed=3)
THROUGH_TEXT = TextDraft(LETTERS, Letters(), Merging(), 3)


@pytest.mark.parametrize("name", ["chain", "match", "block", "gumbel"])
def test_drafts_through_their_text_are_lossless(name: str) -> None:
    """Point masses, under every rule over chains, in whole decodes: what the drafter holds from step to step is in it."""
    named, asked = RULES[name], {"max_new_tokens": 4, "eos_token_ids": (1,)}
    decoder = Decoder(target=TARGET, drafter=THROUGH_TEXT, rule=named.rule, drafts=named.drafts)
    assert total_variation(decoded_law(decoder, **asked, merge=False), autoregressive_law(TARGET, **asked)) < EXACT


def requests(number: int, **changed: object) -> list[Row]:
    """Requests with different prompts."""
    params = replace(SamplingParams(max_new_tokens=6), **changed)
    prompts = [(0,), (2, 1), (1, 0)]
    return [Row(DecodeRequest(id=f"{n}", prompt_ids=prompts[n % 3], params=params, seed=n), n) for n in range(number)]


def test_drafts_through_their_text_are_accepted_and_change_nothing() -> None:
    """In a batch whose rows end at different times; greedy, so that ON must be OFF."""
    decoder = Decoder(target=TARGET, drafter=THROUGH_TEXT)
    rows = requests(9, temperature=0, eos_token_ids=(1,))
    on, off = (
        sorted((trace.request.id, trace.token_ids) for trace in algorithm(decoder, rows))
        for algorithm in (speculative, autoregressive)
    )
    assert on == off
    counters = count(speculative(decoder, requests(24)))
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


class Watched(TextDraft):
    """Each proposal is held against one of a drafting that holds nothing yet."""

    def __call__(self, context: Context):
        return _Watching(super().__call__(context), self)


@dataclass
class _Watching:
    kept: object
    drafter: TextDraft

    def propose(self, context, max_tokens):
        fresh = TextDraft.__call__(self.drafter, context).propose(context, max_tokens)
        held = self.kept.propose(context, max_tokens)
        assert torch.equal(fresh.token_ids, held.token_ids)
        assert torch.equal(fresh.num_draft_tokens, held.num_draft_tokens)
        return held

    def select(self, rows):
        self.kept.select(rows)


def test_what_a_drafter_holds_is_what_a_fresh_one_would() -> None:
    """The text so far may be encoded otherwise in each step, and rows leave the batch."""
    watched = Watched(LETTERS, Letters(), Merging(), 3)
    traces = list(speculative(Decoder(target=TARGET, drafter=watched), requests(12, eos_token_ids=(1,))))
    assert len(traces) == 12


def test_nothing_is_drafted_where_it_does_not_fit() -> None:
    """A draft model that has no positions left, and no room for a draft; an id that the target can't emit ends one."""
    rows = requests(1)
    context = Context.start(rows, torch.device("cpu"), choices=lambda _: Philox.start(*[torch.tensor([0])] * 2))
    short = TextDraft(TableModel(LETTERS.levels[:3]), Letters(), Merging(), 3)
    for drafter, most in ((short, 3), (THROUGH_TEXT, 0)):
        proposal = drafter(context).propose(context, torch.tensor([most]))
        assert proposal.num_draft_tokens.tolist() == [0]
    whole, cut = (
        replace(THROUGH_TEXT, vocab_size=size)(context).propose(context, torch.tensor([3])).token_ids[0].tolist()
        for size in (3, 2)
    )
    unsayable = next((place for place, token in enumerate(whole) if token == 2), len(whole))
    assert cut == whole[:unsayable]
