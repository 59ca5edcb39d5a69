"""Planted faults: wrong rules, drafters, laws, stops and caches, each standing for a class of public bugs.

A fault changes one part of the reference decoder and leaves the loop as it is, so a check that passes under it is blind to
that class. `caught_by` names the checks that must fail; the tests prove it for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.errors import PlanError
from specverify.faults.decoder import (
    cache,
    law_without_drafts,
    law_without_penalties,
    one_past_limit,
    seeded_by_place,
    stop_seen_at_block_end_only,
)
from specverify.faults.draft import reporting, top_k
from specverify.faults.rule import ChainParts, always, inflated, or_equal, root, rule, unclamped
from specverify.verification.chain import greedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.decoding import Decoder

__all__ = ["FAULTS", "Fault", "find_fault"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault."""

    name: str
    stands_for: str
    """The class of public bug."""
    caught_by: tuple[str, ...]
    """Ids of the checks that must fail on it."""
    apply: Callable[[Decoder], Decoder]


def find_fault(name: str) -> Fault:
    """The fault of that name. Raises `PlanError` with the nearest name."""
    known = {fault.name: fault for fault in FAULTS}
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "`specverify faults --list` names them"
        msg = f"there is no fault named '{name}'; {hint}"
        raise PlanError(msg)
    return known[name]


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="residual-from-target",
        stands_for="the replacement of a rejected token is drawn from the target instead of [p - q]+",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual=lambda p, _: p)),
    ),
    Fault(
        name="residual-wrong-row",
        stands_for="the residual is taken from the row after the rejected token",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(rejected_row=lambda place: place + 1)),
    ),
    Fault(
        name="residual-not-clamped",
        stands_for="|p - q| in place of [p - q]+",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(residual=unclamped)),
    ),
    Fault(
        name="bonus-from-draft",
        stands_for="the token after a fully accepted block comes from the draft",
        caught_by=("exactness", "lossless"),
        apply=rule(ChainParts(bonus_from_draft=True)),
    ),
    Fault(
        name="draft-temperature",
        stands_for="drafts are drawn at temperature 0.7 of the request's while the unscaled softmax is reported",
        caught_by=("lossless",),
        apply=reporting(lambda law: law ** (1 / 0.7)),
    ),
    Fault(
        name="raw-draft-probs",
        stands_for="drafts are drawn after a top-k of 20 while the raw softmax is reported",
        caught_by=("lossless",),
        apply=reporting(top_k),
    ),
    Fault(
        name="greedy-draft-softmax",
        stands_for="greedy drafts with the softmax reported as their law",
        caught_by=("lossless",),
        apply=reporting(lambda law: torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).double()),
    ),
    Fault(
        name="draft-noise-in-accept",
        stands_for="the uniform that drew the draft also accepts it",
        caught_by=("lossless",),
        apply=rule(ChainParts(accept_stream=Stream.DRAFT)),
    ),
    Fault(
        name="draft-noise-in-residual",
        stands_for="the uniform that drew the draft also draws its replacement",
        caught_by=("lossless",),
        apply=rule(ChainParts(residual_stream=Stream.DRAFT)),
    ),
    Fault(
        name="accept-noise-in-residual",
        stands_for="the uniform that rejected the draft also draws its replacement",
        caught_by=("lossless",),
        apply=rule(ChainParts(residual_stream=Stream.ACCEPT)),
    ),
    Fault(
        name="cache-one-short",
        stands_for="rollback drops one token too many",
        caught_by=("greedy", "lossless"),
        apply=cache(-1),
    ),
    Fault(
        name="cache-one-long",
        stands_for="rollback keeps one rejected token",
        caught_by=("greedy",),
        apply=cache(1),
    ),
    Fault(
        name="eos-inside-block-ignored",
        stands_for="an EOS that is accepted inside a block does not end the text",
        caught_by=("stopping",),
        apply=lambda decoder: replace(decoder, stop=stop_seen_at_block_end_only),
    ),
    Fault(
        name="one-past-limit",
        stands_for="one token more than the limit is emitted",
        caught_by=("stopping",),
        apply=lambda decoder: replace(decoder, stop=one_past_limit),
    ),
    Fault(
        name="penalties-skip-drafts",
        stands_for="penalties and bans don't see the drafted tokens before a position",
        caught_by=("parameters",),
        apply=lambda decoder: replace(decoder, law=law_without_drafts),
    ),
    Fault(
        name="penalties-ignored",
        stands_for="penalties, bans and minimum length are dropped without a word",
        caught_by=("parameters",),
        apply=lambda decoder: replace(decoder, law=law_without_penalties),
    ),
    Fault(
        name="greedy-verification",
        stands_for="drafts are verified greedily whatever the temperature",
        caught_by=("exactness", "lossless"),
        apply=rule(greedy),
    ),
    Fault(
        name="always-accept",
        stands_for="every draft is accepted",
        caught_by=("exactness", "greedy", "lossless"),
        apply=rule(ChainParts(accept_probs=always)),
    ),
    Fault(
        name="ratio-inflated",
        stands_for="the acceptance ratio is multiplied by 1.1",
        caught_by=("exactness", "acceptance"),
        apply=rule(ChainParts(accept_probs=inflated)),
    ),
    Fault(
        name="ratio-square-root",
        stands_for="the square root of the acceptance ratio is used",
        caught_by=("exactness", "lossless", "acceptance"),
        apply=rule(ChainParts(accept_probs=root)),
    ),
    Fault(
        name="accept-or-equal",
        stands_for="`u <= p`: a token of probability 0 passes when the uniform is exactly 0",
        caught_by=("exactness",),
        apply=rule(ChainParts(accept_probs=or_equal)),
    ),
    Fault(
        name="seed-by-batch-place",
        stands_for="a request's random numbers depend on its place in the batch",
        caught_by=("reproducibility",),
        apply=seeded_by_place,
    ),
)
"""All planted faults, in the order in which `specverify faults` lists them."""
