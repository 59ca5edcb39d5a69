"""Exact laws: known answers by hand, merged and whole decodes agree, and each sees what it says that it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specverify.decoding import Decoder
from specverify.drafting import DraftModel, NoDraft, ScriptedDrafts
from specverify.faults import find_fault
from specverify.law import (
    Block,
    autoregressive_law,
    decoded_law,
    decoded_laws,
    greedy_law,
    step_laws,
    total_variation,
)
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, SamplingParams
from specverify.verification.rules import RULES

ASKED = {"max_new_tokens": 3, "eos_token_ids": (1,)}


def decoder(name: str = "chain", *, drafts: int = 2) -> Decoder:
    """A rule over tables of three ids."""
    target, draft = (random_table(3, 5, seed=seed) for seed in (0, 1))
    return Decoder(target=target, drafter=DraftModel(draft, 3), rule=RULES[name].rule, num_speculative_tokens=drafts)


def constant(*probs: float, depth: int = 4) -> TableModel:
    """The same law after every prefix."""
    row = torch.tensor(probs, dtype=torch.float64).log()
    return TableModel(tuple(row.expand(len(probs) ** length, -1) for length in range(depth)))


def test_total_variation_is_half_of_what_differs() -> None:
    """By hand: 1/4 too little on (0,), 3/4 on one text that only the second has, 1/2 on one that only the first has."""
    first, second = {(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (2, 1): 0.75}
    assert total_variation(first, second) == total_variation(second, first) == 0.75
    assert total_variation(first, first) == 0


def test_autoregressive_law_is_the_product_of_conditionals() -> None:
    """By hand: two tokens, the second after an EOS is not there."""
    law = autoregressive_law(constant(0.5, 0.25, 0.25), max_new_tokens=2, eos_token_ids=(1,))
    assert law == pytest.approx({
        (1,): 0.25, (0, 0): 0.25, (0, 1): 0.125, (0, 2): 0.125, (2, 0): 0.125, (2, 1): 0.0625, (2, 2): 0.0625,
    })  # fmt: skip


def test_autoregressive_law_normalises_and_lists_only_what_can_happen() -> None:
    """A table that was built from weights, with an impossible id."""
    unnormalised = TableModel(tuple(level + torch.tensor(3.0).log() for level in constant(0.75, 0.25, 0.0).levels))
    assert autoregressive_law(unnormalised, max_new_tokens=1) == pytest.approx({(0,): 0.75, (1,): 0.25})


def test_greedy_law_takes_the_lowest_of_the_most_probable_and_stops_at_eos() -> None:
    """Ids 1 and 2 are equally probable."""
    table = constant(0.2, 0.4, 0.4)
    assert greedy_law(table, max_new_tokens=3) == {(1, 1, 1): 1.0}
    assert greedy_law(table, max_new_tokens=3, eos_token_ids=(1,)) == {(1,): 1.0}


def test_laws_depend_on_the_prompt() -> None:
    """The reference law and the decoded one read the same prompt."""
    asked = decoder()
    requests = [
        DecodeRequest(id="law", prompt_ids=prompt, params=SamplingParams(max_new_tokens=2)) for prompt in ((0,), (2, 1))
    ]
    laws = decoded_laws(asked, requests)
    wanted = [autoregressive_law(asked.target, max_new_tokens=2, prompt_ids=each.prompt_ids) for each in requests]
    assert total_variation(laws[0], wanted[0]) < 1e-12
    assert total_variation(laws[1], wanted[1]) < 1e-12
    assert total_variation(*wanted) > 0.1


def test_step_law_of_one_draft_is_the_papers() -> None:
    """Accept min(p, q) and add the bonus; else the residual, which is on id 0 alone here [Leviathan2023, Alg. 1]."""
    two = replace(decoder(drafts=1), target=constant(0.75, 0.25), drafter=DraftModel(constant(0.5, 0.5), 2))
    request = DecodeRequest(id="step", prompt_ids=(0,), params=SamplingParams(max_new_tokens=2, eos_token_ids=(1,)))
    [law] = step_laws(two, [request])
    assert law == pytest.approx({
        Block((0, 0), 1, ends=True): 0.5 * 0.75,
        Block((0, 1), 1, ends=True): 0.5 * 0.25,
        Block((1,), 1, ends=True): 0.25,
        Block((0,), 0, ends=False): 0.25,
    })  # fmt: skip


@pytest.mark.parametrize("name", ["chain", "match", "greedy"])
@pytest.mark.parametrize("eos_token_ids", [(), (1,), (0, 2)])
def test_merging_changes_no_law(name: str, eos_token_ids: tuple[int, ...]) -> None:
    """Composed of steps, or all paths of whole decodes; right rules and wrong ones."""
    for subject in (decoder(name), find_fault("residual-from-target").apply(decoder(name))):
        asked = {"max_new_tokens": 3, "eos_token_ids": eos_token_ids}
        assert total_variation(decoded_law(subject, **asked), decoded_law(subject, **asked, merge=False)) < 1e-12


def test_probabilities_add_up_to_one_under_a_fault() -> None:
    """Merging follows texts that go on after an EOS or past the limit, too."""
    for name in ("eos-inside-block-ignored", "one-past-limit"):
        law = decoded_law(find_fault(name).apply(decoder()), **ASKED)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert total_variation(law, autoregressive_law(decoder().target, **ASKED)) > 1e-3


@pytest.mark.parametrize("name", ["cache-one-short", "cache-one-long"])
def test_only_whole_decodes_see_what_is_carried_from_step_to_step(name: str) -> None:
    """What merging assumes, and why `merge=False` is kept."""
    subject = find_fault(name).apply(decoder())
    wanted = autoregressive_law(decoder().target, **ASKED)
    [merged] = decoded_laws(subject, [DecodeRequest(id="law", prompt_ids=(0,), params=SamplingParams(**ASKED))])
    assert total_variation(merged, wanted) < 1e-12
    assert merged == decoded_law(subject, **ASKED)
    whole = decoded_law(subject, **ASKED, merge=False)
    assert total_variation(whole, wanted) > 1e-3
    assert {type(weight) for weight in whole.values()} == {float}


def test_merging_takes_every_step_for_a_first_one() -> None:
    """The assumption again, with drafts that depend on the number of the step and are all accepted."""
    drafts = ScriptedDrafts(lambda _, step: [2] if step else [0], 3)
    subject = find_fault("always-accept").apply(replace(decoder(), drafter=drafts))
    merged, whole = (decoded_law(subject, max_new_tokens=4, merge=merge) for merge in (True, False))
    assert total_variation(merged, whole) > 1e-3


def test_without_drafts_the_loop_is_the_target() -> None:
    """Steps of one token."""
    subject = replace(decoder(), drafter=NoDraft(3))
    assert total_variation(decoded_law(subject, **ASKED), autoregressive_law(subject.target, **ASKED)) < 1e-12


def test_a_row_is_normalised_and_what_is_impossible_is_in_no_law() -> None:
    """Weights 2, 2 and 0."""
    assert autoregressive_law(constant(2.0, 2.0, 0.0), max_new_tokens=1) == {(0,): 0.5, (1,): 0.5}
