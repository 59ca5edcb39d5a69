"""Sampling parameters that are dropped, applied twice, or applied to some rows of a block only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specverify.faults.fault import Fault
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.decoding import Decoder, Law
    from specverify.records import SamplingParams

    Params = Sequence[SamplingParams]

__all__ = ["PARAMETER_FAULTS", "law_of"]


def law_of(change: Callable[[Params], Params]) -> Law:
    """The law of other parameters than the requests'."""

    def law(logits: Float[Tensor, "batch n vocab"], params: Params, **where: Tensor) -> Float[Tensor, "batch n vocab"]:
        return probabilities(logits, change(params), **where)

    return law


def _each(change: Callable[[SamplingParams], SamplingParams]) -> Law:
    return law_of(lambda params: [change(one) for one in params])


def _bonus_apart(drafts: Law, bonus: Law) -> Law:
    """One law for the rows that verify drafts, and another for the last row of a block, which gives the bonus."""

    def law(
        logits: Float[Tensor, "batch n vocab"],
        params: Params,
        *,
        prefix_lengths: Int[Tensor, "batch n"],
        **where: Tensor,
    ) -> Float[Tensor, "batch n vocab"]:
        parts = [
            part(logits[:, rows], params, prefix_lengths=prefix_lengths[:, rows], **where)
            for part, rows in ((drafts, slice(None, -1)), (bonus, slice(-1, None)))
            if prefix_lengths[:, rows].numel()
        ]
        return torch.cat(parts, 1)

    return law


def _at_prefix(seen: Callable[[Tensor], Tensor]) -> Law:
    """Penalties and bans that see another prefix than the one before their position."""

    def law(
        logits: Float[Tensor, "batch n vocab"],
        params: Params,
        *,
        prefix_lengths: Int[Tensor, "batch n"],
        **where: Tensor,
    ) -> Float[Tensor, "batch n vocab"]:
        return probabilities(logits, params, prefix_lengths=seen(prefix_lengths).expand_as(prefix_lengths), **where)

    return law


def _without_penalties(one: SamplingParams) -> SamplingParams:
    return replace(one, repetition_penalty=1.0, no_repeat_ngram_size=0, min_new_tokens=0, banned_token_ids=())


def _without_truncation(one: SamplingParams) -> SamplingParams:
    return replace(one, top_k=0, top_p=1.0, min_p=0.0)


def _with(law: Law) -> Callable[[Decoder], Decoder]:
    return lambda decoder: replace(decoder, law=law)


PARAMETER_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="penalties-skip-drafts",
        stands_for="penalties and bans don't see the drafted tokens before a position",
        caught_by=("parameters",),
        apply=_with(_at_prefix(lambda lengths: lengths[:, :1])),
    ),
    Fault(
        name="penalties-see-later-drafts",
        stands_for="penalties and bans are computed once from the whole block, so a draft is punished for itself",
        caught_by=("parameters",),
        apply=_with(_at_prefix(lambda lengths: lengths[:, -1:])),
    ),
    Fault(
        name="penalties-ignored",
        stands_for="penalties, bans and minimum length are dropped without a word",
        caught_by=("parameters",),
        apply=_with(_each(_without_penalties)),
    ),
    Fault(
        name="bans-skip-bonus",
        stands_for="banned words are masked where drafts are verified, and not in the bonus row",
        caught_by=("parameters",),
        apply=_with(_bonus_apart(probabilities, _each(lambda one: replace(one, banned_token_ids=())))),
    ),
    Fault(
        name="truncation-on-bonus-only",
        stands_for="top-k, top-p and min-p are honoured in the bonus row alone",
        caught_by=("parameters",),
        apply=_with(_bonus_apart(_each(_without_truncation), probabilities)),
    ),
    Fault(
        name="top-p-ignored",
        stands_for="the draft honours top-p and the target does not",
        caught_by=("parameters",),
        apply=_with(_each(lambda one: replace(one, top_p=1.0))),
    ),
    Fault(
        name="min-p-ignored",
        stands_for="min-p is accepted as a parameter and never applied",
        caught_by=("parameters",),
        apply=_with(_each(lambda one: replace(one, min_p=0.0))),
    ),
    Fault(
        name="temperature-twice",
        stands_for="logits that were already divided by the temperature are divided once more",
        caught_by=("parameters",),
        apply=_with(_each(lambda one: replace(one, temperature=one.temperature**2))),
    ),
)
"""What a request asks for and does not get."""
