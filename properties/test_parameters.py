"""parameters: the law of the next token is the one that the sampling parameters define, for each row by itself.

Held against an implementation in NumPy that goes through the ids one by one and shares nothing with the package: bans and
penalties from the exact prefix (never what stands after it, never padding, never another row), then temperature, top-k,
top-p and min-p in that order. A row's law depends neither on its batch nor on its place there.

Faults that it must catch: drafts hidden from the penalties, penalties dropped, padding penalised, temperature after the
truncations, top-k of one more, a nucleus without the token that crosses its edge, min-p of the mass instead of the peak,
a minimum length counted from the start of the prompt, one row's parameters for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from properties.strategies import Prefixed, prefixed_rows
from specverify.decoding import Decoder
from specverify.drafting import NoDraft
from specverify.errors import NonFiniteLogits
from specverify.faults import find_fault
from specverify.models.table import random_table
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.decoding import Law
    from specverify.records import SamplingParams

VOCAB_SIZE = 6
BLOCK = 3
TOLERANCE = 1e-12
"""Logits are float64 here, and stay so."""


# ------------------------------------------------------------------------------------------- the same, id by id


def written_out(
    logits: Sequence[float], params: SamplingParams, prefix: Sequence[int], prompt_length: int
) -> np.ndarray:
    """The law after `prefix`, one id at a time."""
    scores = [float(logit) for logit in logits]
    for token in set(prefix):
        factor = params.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    for token in range(len(scores)):
        if is_forbidden(token, params, list(prefix), prompt_length):
            scores[token] = -np.inf
    if params.temperature == 0:
        return np.eye(len(scores))[scores.index(max(scores))]
    scores = [score / params.temperature for score in scores]
    for truncated in (in_top_k, in_nucleus, above_min_p):
        kept = truncated(scores, params)
        scores = [score if keep else -np.inf for score, keep in zip(scores, kept, strict=True)]
    return shares(scores)


def is_forbidden(token: int, params: SamplingParams, prefix: list[int], prompt_length: int) -> bool:
    """Whether emitting `token` would repeat an n-gram, complete a banned sequence, or end the text too early."""
    longer = [*prefix, token]
    n = params.no_repeat_ngram_size
    seen = [prefix[start : start + n] for start in range(len(prefix) - n + 1)]
    if n and longer[-n:] in seen:
        return True
    if token in params.eos_token_ids and len(prefix) - prompt_length < params.min_new_tokens:
        return True
    banned = [list(ids) for ids in params.banned_token_ids]
    return any(
        longer[-len(ids) :] == ids and not (len(ids) == 1 and ids[0] in params.eos_token_ids)  # an EOS can't be banned
        for ids in banned
    )


def in_top_k(scores: list[float], params: SamplingParams) -> list[bool]:
    """Ids that fewer than k others beat; ties at the edge all stay."""
    k = params.top_k or len(scores)
    return [sum(other > score for other in scores) < k for score in scores]


def in_nucleus(scores: list[float], params: SamplingParams) -> list[bool]:
    """The most probable ids up to the one at which their sum reaches top_p; the last of a tie first to go, by id."""
    law = shares(scores)
    order = sorted(range(len(scores)), key=lambda token: (law[token], token))  # least probable first
    kept, below = [True] * len(scores), 0.0
    for token in order[:-1]:
        below += law[token]
        kept[token] = params.top_p == 1 or below > 1 - params.top_p
    return kept


def above_min_p(scores: list[float], params: SamplingParams) -> list[bool]:
    """Ids with at least min_p of the largest probability."""
    law = shares(scores)
    return [share >= params.min_p * max(law) for share in law]


def shares(scores: list[float]) -> np.ndarray:
    """Softmax."""
    weights = np.exp(np.array(scores) - max(scores))
    return weights / weights.sum()


def on_an_edge(row: Prefixed, place: int) -> bool:
    """Whether rounding may decide a truncation the other way: a share within 1e-9 of top_p's or min_p's edge."""
    params = row.params
    if params.temperature == 0:
        return False
    untruncated = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    topped = replace(params, top_p=1.0, min_p=0.0)
    prefix = row.token_ids[: row.first + place]
    law = written_out(row.logits[place], topped if params.top_k else untruncated, prefix, row.prompt_length)
    sums = np.cumsum(np.sort(law))
    nucleus = written_out(row.logits[place], replace(params, min_p=0.0), prefix, row.prompt_length)
    return bool(
        (params.top_p < 1 and np.abs(sums - (1 - params.top_p)).min() < 1e-9)
        or (params.min_p and np.abs(nucleus - params.min_p * nucleus.max()).min() < 1e-9 * nucleus.max())
    )


# ------------------------------------------------------------------------------------------------ the property


def together(law: Law, rows: Sequence[Prefixed], padding: int = 0) -> torch.Tensor:
    """The laws of all rows and places in one call; the texts are right-padded with `padding`."""
    width = max(len(row.token_ids) for row in rows)
    padded = [[*row.token_ids, *[padding] * (width - len(row.token_ids))] for row in rows]
    return law(
        torch.tensor([row.logits for row in rows], dtype=torch.float64),
        [row.params for row in rows],
        token_ids=torch.tensor(padded),
        prefix_lengths=torch.tensor([[row.first + place for place in range(BLOCK)] for row in rows]),
        prompt_lengths=torch.tensor([row.prompt_length for row in rows]),
    )


def follows_the_definition(law: Law, rows: Sequence[Prefixed]) -> None:
    """Each row and place has the law that is written out, and a support that is the same to the id."""
    laws = together(law, rows)
    for index, row in enumerate(rows):
        for place in range(BLOCK):
            expected = written_out(row.logits[place], row.params, row.token_ids[: row.first + place], row.prompt_length)
            if on_an_edge(row, place):
                continue
            actual = laws[index, place].numpy()
            assert abs(actual.sum() - 1) < TOLERANCE
            assert (actual > 0).tolist() == (expected > 0).tolist(), f"place {place} of row {index} has another support"
            assert np.abs(actual - expected).max() < TOLERANCE, f"place {place} of row {index} has another law"


def leaves_a_token(row: Prefixed) -> bool:
    """Whether bans and minimum length leave something to emit at every place."""
    return all(
        not all(
            is_forbidden(token, row.params, list(row.token_ids[: row.first + place]), row.prompt_length)
            for token in range(VOCAB_SIZE)
        )
        for place in range(BLOCK)
    )


ROWS = st.lists(prefixed_rows(VOCAB_SIZE, BLOCK).filter(leaves_a_token), min_size=1, max_size=3)


@given(rows=ROWS)
def test_law_is_the_one_that_the_parameters_define(rows: list[Prefixed]) -> None:
    """All parameters, alone and together, after ragged prefixes."""
    follows_the_definition(probabilities, rows)


@given(rows=ROWS, data=st.data())
def test_rows_do_not_influence_each_other(rows: list[Prefixed], data: st.DataObject) -> None:
    """In any order, alone, and whatever the padding holds: the same bits."""
    laws = together(probabilities, rows)
    order = data.draw(st.permutations(range(len(rows))), label="order")
    assert torch.equal(together(probabilities, [rows[index] for index in order], padding=1), laws[list(order)])
    for index, row in enumerate(rows):
        assert torch.equal(together(probabilities, [row])[0], laws[index])


@given(row=prefixed_rows(VOCAB_SIZE, BLOCK).filter(leaves_a_token), later=st.integers(0, VOCAB_SIZE - 1))
def test_a_place_sees_nothing_after_it(row: Prefixed, later: int) -> None:
    """Another token behind a place changes no law up to it."""
    end = row.first + BLOCK - 1
    changed = replace(row, token_ids=(*row.token_ids[:end], *[later] * (len(row.token_ids) - end)))
    assert torch.equal(together(probabilities, [changed]), together(probabilities, [row]))


# ------------------------------------------------------------------------------------------------ planted faults


def planted(name: str) -> Law:
    """The law of a known fault."""
    return find_fault(name).apply(Decoder(target=random_table(2, 1, seed=0), drafter=NoDraft(2))).law


def changed_params(change: Callable[[SamplingParams], SamplingParams]) -> Law:
    """The law of other parameters than those that were asked for."""
    return lambda logits, params, **where: probabilities(logits, [change(one) for one in params], **where)


def padding_penalised(logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor) -> torch.Tensor:
    """Every row is as long as the longest."""
    end = where["prefix_lengths"] + where["token_ids"].shape[1] - int(where["prefix_lengths"].min())
    return probabilities(logits, params, **where | {"prefix_lengths": end.clamp(max=where["token_ids"].shape[1])})


def temperature_last(logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor) -> torch.Tensor:
    """Truncations look at the distribution before the temperature."""
    at_one = probabilities(logits, [replace(one, temperature=float(one.temperature > 0)) for one in params], **where)
    power = torch.tensor([1 / one.temperature if one.temperature else 1.0 for one in params])[:, None, None]
    law = (at_one / at_one.amax(-1, keepdim=True)) ** power
    return law / law.sum(-1, keepdim=True)


def nucleus_without_its_last(logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor) -> torch.Tensor:
    """The token with which the sum passes top_p is dropped, unless it is alone."""
    law = probabilities(logits, params, **where)
    least = law.masked_fill(law == 0, 2).argmin(-1, keepdim=True)
    cut = torch.tensor([one.top_p < 1 for one in params])[:, None, None] & ((law > 0).sum(-1, keepdim=True) > 1)
    law = torch.where(cut, law.scatter(-1, least, 0), law)
    return law / law.sum(-1, keepdim=True)


def min_p_of_the_mass(logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor) -> torch.Tensor:
    """Ids of at least min_p, whatever the largest has."""
    law = probabilities(logits, [replace(one, min_p=0.0) for one in params], **where)
    edge = torch.tensor([one.min_p for one in params], dtype=torch.float64)[:, None, None]
    law = torch.where((law >= edge) | (law == law.amax(-1, keepdim=True)), law, 0)
    return law / law.sum(-1, keepdim=True)


def length_from_the_prompts_start(
    logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor
) -> torch.Tensor:
    """The prompt counts towards the minimum length."""
    return probabilities(logits, params, **where | {"prompt_lengths": torch.zeros_like(where["prompt_lengths"])})


def first_rows_for_all(logits: torch.Tensor, params: list[SamplingParams], **where: torch.Tensor) -> torch.Tensor:
    """A batch is sampled as its first row asks."""
    return probabilities(logits, params[:1] * len(params), **where)


FAULTS: dict[str, Law] = {
    "penalties-skip-drafts": planted("penalties-skip-drafts"),
    "penalties-see-later-drafts": planted("penalties-see-later-drafts"),
    "penalties-ignored": planted("penalties-ignored"),
    "padding-penalised": padding_penalised,
    "temperature-last": temperature_last,
    "top-k-of-one-more": changed_params(lambda one: replace(one, top_k=one.top_k and one.top_k + 1)),
    "nucleus-without-its-last": nucleus_without_its_last,
    "min-p-of-the-mass": min_p_of_the_mass,
    "length-from-the-prompts-start": length_from_the_prompts_start,
    "first-rows-parameters-for-all": first_rows_for_all,
    "bans-match-single-ids-only": changed_params(
        lambda one: replace(one, banned_token_ids=tuple(ids for ids in one.banned_token_ids if len(ids) == 1))
    ),
    "penalty-always-divides": changed_params(
        lambda one: replace(one, repetition_penalty=max(one.repetition_penalty, 1 / one.repetition_penalty))
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_property_fails_on_its_faults(name: str) -> None:
    """Some rows tell each from the definition."""
    failing = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True)(
        given(rows=ROWS)(lambda rows: follows_the_definition(FAULTS[name], rows))
    )
    with pytest.raises(AssertionError, match="of row"):
        failing()


@given(row=prefixed_rows(VOCAB_SIZE, BLOCK), ids=st.permutations(range(VOCAB_SIZE)))
def test_parameters_that_leave_no_token_are_refused_where_the_text_is_greedy(row: Prefixed, ids: list[int]) -> None:
    """Never answered with some id."""
    params = replace(row.params, temperature=0, eos_token_ids=(), banned_token_ids=tuple((token,) for token in ids))
    with pytest.raises(NonFiniteLogits, match="leave no token"):
        together(probabilities, [replace(row, params=params)])
