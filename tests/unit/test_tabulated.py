"""Decoding by look-up: the loop's own texts, token by token; the rule's own law, outcome by outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from specverify import tabulated
from specverify.choices import Stream
from specverify.choices.splitmix import SplitMix, mix64
from specverify.context import Row
from specverify.decoding import Decoder, speculative
from specverify.drafting import DraftModel
from specverify.faults import find_fault
from specverify.law import decoded_law, step_laws, total_variation
from specverify.models.table import random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.tabulated import sample, sample_steps, tabulate, tabulate_rule
from specverify.verification.rules import RULES

VOCAB_SIZE, TOKENS = 3, 4
RULES_OF_CHAINS = ["chain", "match", "greedy"]
MASK64 = 2**64 - 1


def models(zeros: float = 0.0):
    """Target and draft."""
    return [random_table(VOCAB_SIZE, TOKENS + 1, seed=seed, zeros=zeros) for seed in (5, 6)]


# ---------------------------------------------------------------------------------------------------------- uniforms


def test_the_mixer_gives_splitmix64s_published_outputs() -> None:
    """The first outputs of the generator seeded with 1234567, and with 0."""
    states = 1234567 + torch.arange(5) * (0x9E3779B97F4A7C15 - 2**64)
    assert [each & MASK64 for each in mix64(states).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert int(mix64(torch.tensor(0))) & MASK64 == 0xE220A8397B1DCDAF


def test_uniforms_are_uniform_and_streams_independent() -> None:
    """Means and correlations of all streams, at two offsets, within five standard errors; never 1."""
    count = 50_000
    choices = SplitMix.start(7, torch.arange(count))
    uniforms = torch.cat([choices.uniform(stream, torch.arange(2)) for stream in Stream], 1).T
    assert float(uniforms.min()) >= 0
    assert float(uniforms.max()) < 1
    assert float((uniforms.mean(1) - 0.5).abs().max()) < 5 * (1 / 12 / count) ** 0.5
    correlations = torch.corrcoef(uniforms) - torch.eye(len(uniforms), dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / count**0.5


def test_every_coordinate_changes_the_uniform_and_the_batch_does_not() -> None:
    """Seed, sequence, stream, position, step; the target's stream alone ignores the step."""
    place = torch.tensor([3])
    here = SplitMix.start(1, torch.arange(8)).moved(place, place)
    at = torch.tensor([1])
    base = here.uniform(Stream.ACCEPT, at)
    changed = [
        SplitMix.start(2, torch.arange(8)).moved(place, place).uniform(Stream.ACCEPT, at),
        here.uniform(Stream.DRAFT, at),
        here.moved(place + 1, place).uniform(Stream.ACCEPT, at),
        here.moved(place, place + 1).uniform(Stream.ACCEPT, at),
    ]
    assert torch.cat([base, *changed]).unique().numel() == 5 * 8
    assert torch.equal(here.uniform(Stream.ACCEPT, at + 1), changed[2])
    target = here.uniform(Stream.TARGET, at)
    assert torch.equal(here.moved(place, place + 1).uniform(Stream.TARGET, at), target)
    assert torch.equal(here.moved(place + 1, place).uniform(Stream.TARGET, at - 1), target)
    rows = torch.tensor([5, 2])
    assert torch.equal(here.select(rows).uniform(Stream.ACCEPT, at), base[rows])
    streams = torch.full((8, 1), int(Stream.ACCEPT))
    assert torch.equal(here.uniform(streams, at.expand(8, 1)), base)
    standing = here.moved(place.expand(8), place.expand(8))
    assert torch.equal(standing.select(rows).uniform(Stream.ACCEPT, at), base[rows])


def test_races_are_won_with_the_laws_probabilities_and_share_their_noise() -> None:
    """Shares within five standard errors, an impossible id never; races over one law at one position agree."""
    count = 50_000
    law = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    other = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    choices = SplitMix.start(3, torch.arange(count))
    place = torch.tensor([0, 1])
    first = choices.race(law.expand(count, 2, -1), at=place)
    shares = first[:, 0].bincount(minlength=4) / count
    assert float(((shares - law).abs() / (law * (1 - law) / count).sqrt().clamp(min=1e-12)).max()) < 5
    zero, one = torch.tensor([0]), torch.tensor([1])
    assert torch.equal(choices.moved(one, one).race(law.expand(count, 1, -1), at=zero)[:, 0], first[:, 1])
    agreed = float((choices.race(other.expand(count, 1, -1), at=zero)[:, 0] == first[:, 0]).double().mean())
    expected = sum(
        1 / float(torch.maximum(law / law[x], other / other[x]).sum()) for x in range(4) if law[x] > 0
    )  # [Daliri2024]
    assert agreed == pytest.approx(expected, abs=5 * 0.5 / count**0.5)


# ------------------------------------------------------------------------------------------------------------ tables


def test_rows_are_the_models_laws_and_nodes_are_texts() -> None:
    """Every text has its number, and the row of that number is what the model says after it."""
    target, draft = models()
    pair = tabulate(target, draft, max_new_tokens=TOKENS)
    texts = pair.texts().tolist()
    assert len(texts) == pair.num_texts == 1 + 3 + 9 + 27 + 81
    for length in range(TOKENS + 1):
        for ids in product(range(VOCAB_SIZE), repeat=length):
            node = pair.node(ids)
            assert texts[node] == [*ids, *[-1] * (TOKENS - length)]
            if length < TOKENS:
                torch.testing.assert_close(pair.target_probs[node], target.row((0, *ids)).exp(), rtol=0, atol=1e-15)
                torch.testing.assert_close(pair.draft_probs[node], draft.row((0, *ids)).exp(), rtol=0, atol=1e-15)


def test_sampling_parameters_apply_to_both_models() -> None:
    """Top-1 makes point masses of all rows."""
    pair = tabulate(*models(), max_new_tokens=2, params=SamplingParams(top_k=1))
    for rows in (pair.target_probs, pair.draft_probs):
        assert torch.equal(rows.sort(-1).values, torch.tensor([0.0, 0, 1], dtype=torch.float64).expand(4, -1))


# ------------------------------------------------------------------------------------------------ the unchanged rule


@dataclass(frozen=True)
class ByPosition:
    """The sampler numbers a step by where it begins; so must the loop, to get the same uniforms."""

    inner: SplitMix

    def moved(self, position, step):
        return ByPosition(self.inner.moved(position, position))

    def select(self, rows):
        return ByPosition(self.inner.select(rows))

    def accept(self, prob, **asked):
        return self.inner.accept(prob, **asked)

    def draw(self, probs, **asked):
        return self.inner.draw(probs, **asked)

    def race(self, probs, **asked):
        return self.inner.race(probs, **asked)


@pytest.mark.parametrize("eos_token_ids", [(), (1,)])
@pytest.mark.parametrize("name", [*RULES_OF_CHAINS, "draft-noise-in-accept", "bonus-from-draft"])
def test_samples_are_the_loops_texts(name: str, eos_token_ids: tuple[int, ...]) -> None:
    """With the same uniforms the real decoder emits the same ids, accepts as many and takes as many steps."""
    target, draft = models(zeros=0.2)
    rule = RULES[name].rule if name in RULES else find_fault(name).apply(Decoder(target=target, drafter=None)).rule
    params = SamplingParams(max_new_tokens=TOKENS, eos_token_ids=eos_token_ids)
    request = DecodeRequest(id="sample", prompt_ids=(0,), params=params)
    decoder = Decoder(
        target=target,
        drafter=DraftModel(draft, VOCAB_SIZE),
        rule=rule,
        choices=lambda rows: ByPosition(SplitMix.start(11, torch.tensor([row.sample for row in rows]))),
    )
    traces = sorted(speculative(decoder, [Row(request, index) for index in range(500)]), key=lambda each: each.sample)
    pair = tabulate(target, draft, max_new_tokens=TOKENS, eos_token_ids=eos_token_ids)
    samples = sample(pair, rule, 500, num_speculative_tokens=3, seed=11)
    assert [tuple(x for x in ids if x >= 0) for ids in samples.token_ids.tolist()] == [
        each.token_ids for each in traces
    ]
    assert samples.nodes.tolist() == [pair.node(each.token_ids) for each in traces]
    assert samples.num_steps.tolist() == [len(each.steps) for each in traces]
    assert samples.num_accepted_tokens.tolist() == [
        sum(step.num_accepted_tokens for step in each.steps) for each in traces
    ]


def test_parts_are_the_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunks, and wherever a run begins; another seed is another sample."""
    pair = tabulate(*models(), max_new_tokens=TOKENS)
    rule = RULES["chain"].rule
    table = tabulate_rule(pair, rule, num_speculative_tokens=3)
    whole = sample(pair, rule, 300, num_speculative_tokens=3)
    whole_steps = sample_steps(pair, table, 300)
    monkeypatch.setattr(tabulated, "_CHUNK_NUMBERS", 1_000)
    monkeypatch.setattr(tabulated, "_STEPS_CHUNK", 64)
    assert torch.equal(sample(pair, rule, 200, num_speculative_tokens=3, first=100).nodes, whole.nodes[100:])
    assert torch.equal(sample_steps(pair, table, 200, first=100).nodes, whole_steps.nodes[100:])
    assert not torch.equal(sample(pair, rule, 300, num_speculative_tokens=3, seed=1).nodes, whole.nodes)
    assert not torch.equal(sample_steps(pair, table, 300, seed=1).nodes, whole_steps.nodes)


# ------------------------------------------------------------------------------------------------ the tabulated rule


def law_in(table: tabulated.StepTable, prefix: int) -> dict[int, float]:
    """What the alias table of a prefix draws, worked out."""
    begin, size = int(table.begin[prefix]), int(table.size[prefix])
    law: dict[int, float] = {}
    for entry in range(begin, begin + size):
        below = float(table.threshold[entry])
        for outcome, share in ((int(table.outcome[entry]), below), (int(table.alias[entry]), 1 - below)):
            law[outcome] = law.get(outcome, 0.0) + share / size
    return law


@pytest.mark.parametrize("eos_token_ids", [(), (1,)])
@pytest.mark.parametrize("name", [*RULES_OF_CHAINS, "residual-wrong-row"])
def test_step_tables_hold_the_loops_step_laws(name: str, eos_token_ids: tuple[int, ...]) -> None:
    """After every prefix, for every outcome, as the unchanged loop does it; wrong rules included."""
    target, draft = models(zeros=0.2)
    decoder = Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE))
    decoder = replace(decoder, rule=RULES[name].rule) if name in RULES else find_fault(name).apply(decoder)
    pair = tabulate(target, draft, max_new_tokens=TOKENS, eos_token_ids=eos_token_ids)
    table = tabulate_rule(pair, decoder.rule, num_speculative_tokens=3)
    prefixes = [ids for length in range(TOKENS) for ids in product(range(VOCAB_SIZE), repeat=length)]
    requests = [
        DecodeRequest(
            id="step",
            prompt_ids=(0, *ids),
            params=SamplingParams(max_new_tokens=TOKENS - len(ids), eos_token_ids=eos_token_ids),
        )
        for ids in prefixes
    ]
    for ids, law in zip(prefixes, step_laws(decoder, requests), strict=True):
        wanted: dict[int, float] = {}
        for block, weight in law.items():
            after = pair.node(ids + block.token_ids)
            assert bool(table.going_on[after]) is not block.ends
            wanted[(after << 8) + block.num_accepted_tokens] = weight
        assert total_variation(law_in(table, pair.node(ids)), wanted) <= 1e-12


def test_a_text_has_an_outcome_for_each_number_of_accepted_tokens() -> None:
    """An EOS that was drafted and one that replaced a draft: min(p, q) and [p - q]+ of the same text."""
    seen = set()
    for eos in range(VOCAB_SIZE):
        pair = tabulate(*models(), max_new_tokens=2, eos_token_ids=(eos,))
        law = law_in(tabulate_rule(pair, RULES["chain"].rule, num_speculative_tokens=1), 0)
        p, q = float(pair.target_probs[0, eos]), float(pair.draft_probs[0, eos])
        after = pair.node((eos,)) << 8
        assert law[after + 1] == pytest.approx(min(p, q), abs=1e-12)
        assert law.get(after, 0.0) == pytest.approx(max(p - q, 0.0), abs=1e-12)
        seen.add(p > q)
    assert seen == {False, True}


@pytest.mark.parametrize("name", RULES_OF_CHAINS)
def test_both_samplers_follow_the_decoded_law(name: str) -> None:
    """Within five standard errors in each text, for 200,000 sequences."""
    count = 200_000
    target, draft = models()
    pair = tabulate(target, draft, max_new_tokens=TOKENS, eos_token_ids=(1,))
    rule = RULES[name].rule
    decoder = Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE), rule=rule)
    law = torch.zeros(pair.num_texts, dtype=torch.float64)
    for ids, weight in decoded_law(decoder, max_new_tokens=TOKENS, eos_token_ids=(1,)).items():
        law[pair.node(ids)] = weight
    for samples in (
        sample(pair, rule, count, num_speculative_tokens=3),
        sample_steps(pair, tabulate_rule(pair, rule, num_speculative_tokens=3), count),
    ):
        shares = samples.nodes.bincount(minlength=pair.num_texts) / count
        error = (law * (1 - law) / count).sqrt()
        assert bool(((shares - law).abs() <= 5 * error + 1e-9).all())
