"""Wrong caches, laws, stops and seeds around a rule that is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.decoding import first_stop
from specverify.records import FinishReason
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.decoding import Decoder
    from specverify.drafting import Drafter, Drafting
    from specverify.models import LanguageModel, Session
    from specverify.records import SamplingParams


@dataclass(frozen=True)
class _MisRolled:
    """A model whose cache keeps `extra` tokens more than it is told to after a rejection."""

    inner: LanguageModel
    extra: int

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def num_embeddings(self) -> int:
        return self.inner.num_embeddings

    @property
    def max_length(self) -> int:
        return self.inner.max_length

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        return self.inner.logits(sequences)

    def open(self, prompts: Sequence[Sequence[int]]) -> Session:
        return _MisRolledSession(self.inner.open(prompts), self.extra)


@dataclass
class _MisRolledSession:
    inner: Session
    extra: int

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        return self.inner.lengths

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.inner.append(token_ids, num_tokens, parents)

    def keep(self, places: Tensor, num_kept: Tensor) -> None:
        self.inner.keep(places, num_kept)

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        held = self.inner.lengths
        wrong = torch.where(lengths < held, (lengths + self.extra).clamp(min=0), lengths)
        self.inner.rollback(torch.minimum(wrong, held))

    def select(self, rows: Tensor) -> None:
        self.inner.select(rows)


def cache(extra: int) -> Callable[[Decoder], Decoder]:
    """The target's cache keeps `extra` tokens too many after a rejection."""
    return lambda decoder: replace(decoder, target=_MisRolled(decoder.target, extra))


def law_without_drafts(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    token_ids: Tensor,
    prefix_lengths: Tensor,
    prompt_lengths: Tensor,
) -> Tensor:
    """Every position of a step sees the prefix of its first: the drafts before a position are not penalised."""
    first = prefix_lengths[:, :1].expand_as(prefix_lengths)
    return probabilities(logits, params, token_ids=token_ids, prefix_lengths=first, prompt_lengths=prompt_lengths)


def law_without_penalties(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    token_ids: Tensor,
    prefix_lengths: Tensor,
    prompt_lengths: Tensor,
) -> Tensor:
    """Penalties, bans and minimum length are dropped."""
    bare = [
        replace(one, repetition_penalty=1.0, no_repeat_ngram_size=0, min_new_tokens=0, banned_token_ids=())
        for one in params
    ]
    return probabilities(
        logits, bare, token_ids=token_ids, prefix_lengths=prefix_lengths, prompt_lengths=prompt_lengths
    )


def stop_seen_at_block_end_only(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[tuple[int, FinishReason | None]]:
    """Stops are seen only in the last token of a step; what was accepted before it goes on."""
    whole = torch.minimum(num_emitted, context.limits - context.lengths).tolist()
    limited = (context.lengths + num_emitted >= context.limits).tolist()
    return [
        (kept, finish) if kept == count else (count, FinishReason.LENGTH if at_limit else None)
        for (kept, finish), count, at_limit in zip(
            first_stop(context, emitted, num_emitted), whole, limited, strict=True
        )
    ]


def one_past_limit(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[tuple[int, FinishReason | None]]:
    """The limit is checked before a step's last token is counted."""
    limits, context.limits = context.limits, context.limits + 1
    try:
        return first_stop(context, emitted, num_emitted)
    finally:
        context.limits = limits


def seeded_by_place(decoder: Decoder) -> Decoder:
    """Rows are keyed by their place in the batch, not by their request."""

    @dataclass(frozen=True)
    class Placed:
        inner: Drafter

        def __call__(self, context: Context) -> Drafting:
            choices = context.choices
            places = torch.arange(len(context.rows), device=context.lengths.device)
            context.choices = replace(choices, sequence=places)  # type: ignore[type-var]  # only Philox has a sequence
            return self.inner(context)

    return replace(decoder, drafter=Placed(decoder.drafter))
