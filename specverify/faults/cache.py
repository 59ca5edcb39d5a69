"""Wrong caches around right models: what a rollback, a compaction or a shared prompt leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specverify.drafting import DraftModel
from specverify.errors import PlanError
from specverify.faults.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.decoding import Decoder
    from specverify.models import LanguageModel, Session

    Wrap = Callable[[Session, Sequence[Sequence[int]]], Session]

__all__ = ["CACHE_FAULTS", "PassingSession", "on_target"]


@dataclass(frozen=True)
class _WithSessions:
    """A model whose sessions are wrapped."""

    inner: LanguageModel
    wrap: Wrap

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
        return self.wrap(self.inner.open(prompts), prompts)


@dataclass
class PassingSession:
    """A session that hands everything on, for a fault to change one call of."""

    inner: Session

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        return self.inner.lengths

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits after each appended token."""
        return self.inner.append(token_ids, num_tokens, parents)

    def keep(self, places: Tensor, num_kept: Tensor) -> None:
        """Keep one path of the tree appended last."""
        self.inner.keep(places, num_kept)

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Keep the first tokens of each row, at most those that it holds: a fault may hold fewer than it should."""
        self.inner.rollback(torch.minimum(lengths, self.inner.lengths))

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.inner.select(rows)


@dataclass
class _MisRolled(PassingSession):
    """Keeps `extra` tokens more than it is told to after a rejection."""

    extra: int = 0

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        held = self.inner.lengths
        wrong = torch.where(lengths < held, (lengths + self.extra).clamp(min=0), lengths)
        self.inner.rollback(torch.minimum(wrong, held))


@dataclass
class _NeverRolled(PassingSession):
    """Keeps everything."""

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        del lengths


@dataclass
class _NotCompacted(PassingSession):
    """When rows leave, keeps the first of its rows, whichever they are."""

    def select(self, rows: Tensor) -> None:
        leave = len(rows) < len(self.inner.lengths)
        self.inner.select(torch.arange(len(rows), device=rows.device) if leave else rows)


@dataclass
class _SwappedShares(PassingSession):
    """When a prompt is shared out to its samples, each gets the prompt of the next."""

    def select(self, rows: Tensor) -> None:
        self.inner.select(rows.roll(1) if len(rows) > len(self.inner.lengths) else rows)


class _StaleSlot(PassingSession):
    """After a rollback the first freed slot keeps the token that was rejected there; the next one is not written."""

    def __init__(self, inner: Session, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(inner)
        self._held = [list(prompt) for prompt in prompts]
        self._stale: list[int | None] = [None] * len(self._held)

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        written = token_ids.clone()
        for row, (ids, count) in enumerate(zip(token_ids.tolist(), num_tokens.tolist(), strict=True)):
            stale = self._stale[row]
            if count and stale is not None:
                written[row, 0] = stale
                self._stale[row] = None
            self._held[row] += ids[:count]
        return self.inner.append(written, num_tokens, parents)

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        for row, length in enumerate(lengths.tolist()):
            if length < len(self._held[row]):
                self._stale[row] = self._held[row][length]
                del self._held[row][length:]
        self.inner.rollback(lengths)

    def select(self, rows: Tensor) -> None:
        self._held = [list(self._held[row]) for row in rows.tolist()]
        self._stale = [self._stale[row] for row in rows.tolist()]
        self.inner.select(rows)


@dataclass
class _MissingLast(PassingSession):
    """What a block holds before its last token (the last draft, if all were accepted) is never computed: a slot of zeros."""

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        return self.inner.append(torch.where(places < num_tokens[:, None] - 1, 0, token_ids), num_tokens, parents)


def on_target(wrap: Wrap) -> Callable[[Decoder], Decoder]:
    """The target's cache is wrong."""
    return lambda decoder: replace(decoder, target=_WithSessions(decoder.target, wrap))


def _draft(wrap: Wrap) -> Callable[[Decoder], Decoder]:
    """The draft's cache is wrong. Raises `PlanError` where drafts come from no model."""

    def apply(decoder: Decoder) -> Decoder:
        if not isinstance(decoder.drafter, DraftModel):
            msg = "a fault of the draft's cache needs a draft model; leave out --drafter prompt-lookup"
            raise PlanError(msg)
        return replace(decoder, drafter=replace(decoder.drafter, model=_WithSessions(decoder.drafter.model, wrap)))

    return apply


CACHE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="cache-one-short",
        stands_for="rollback drops one token too many",
        caught_by=("greedy", "lossless"),
        apply=on_target(lambda session, _: _MisRolled(session, -1)),
    ),
    Fault(
        name="cache-one-long",
        stands_for="rollback keeps one rejected token",
        caught_by=("greedy",),
        apply=on_target(lambda session, _: _MisRolled(session, 1)),
    ),
    Fault(
        name="cache-never-rolled-back",
        stands_for="rollback is a silent no-op, as on a recurrent cache: every rejected draft stays in view",
        caught_by=("greedy",),
        apply=on_target(lambda session, _: _NeverRolled(session)),
    ),
    Fault(
        name="cache-stale-slot",
        stands_for="the slot of the replacement keeps the values of the draft that was rejected there",
        caught_by=("greedy",),
        apply=on_target(_StaleSlot),
    ),
    Fault(
        name="cache-not-compacted",
        stands_for="when a sequence ends, the cache keeps the first rows instead of those that go on",
        caught_by=("greedy",),
        apply=on_target(lambda session, _: _NotCompacted(session)),
    ),
    Fault(
        name="shared-prompt-swapped",
        stands_for="samples that share a prompt's cache are handed that of a neighbour",
        caught_by=("lossless",),
        apply=on_target(lambda session, _: _SwappedShares(session)),
    ),
    Fault(
        name="draft-cache-stale-slot",
        stands_for="the draft's cache keeps a rejected token: texts are right, acceptance falls",
        caught_by=("acceptance",),
        apply=_draft(_StaleSlot),
    ),
    Fault(
        name="draft-cache-misses-last",
        stands_for="after a fully accepted block the draft never computes its own last token: texts are right, acceptance falls",
        caught_by=("acceptance",),
        apply=_draft(lambda session, _: _MissingLast(session)),
    ),
)
"""Of the target, which change texts; of the draft, which only cost."""
