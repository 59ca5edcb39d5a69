"""A language model for tests of whole checks: its law is a hash of the prefix, so texts are long, varied and cheap."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specverify.decoding import Decoder
from specverify.drafting import DraftModel
from specverify.engines.reference import ReferenceEngine
from specverify.scoring import ScoredTraces, score
from specverify.subject import EncodedPrompt, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specverify.checks.check import Check
    from specverify.engines import Engine
    from specverify.plan import Plan
    from specverify.records import CheckResult

VOCAB_SIZE = 24
CPU = torch.device("cpu")


@lru_cache(maxsize=1_000_000)
def normal(key: tuple[int, ...]) -> Tensor:
    """Normal numbers that depend on the key alone."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF))


@dataclass(frozen=True, eq=False)
class HashedModel:
    """Logits are normal numbers seeded by the whole prefix; those of a draft are the target's, disturbed."""

    name: str = "target"
    seed: int = 0
    near: HashedModel | None = None
    disturbed_by: float = 0.6
    rounding: float = 0.0
    """Size of a disturbance that depends on the shape of the batch, as in low precision."""
    vocab_size: int = VOCAB_SIZE
    num_embeddings: int = VOCAB_SIZE
    max_length: int = 128
    device: torch.device = CPU

    def row(self, prefix: tuple[int, ...]) -> Tensor:
        """Logits after `prefix`."""
        noise = normal((self.seed, *prefix))
        return 1.5 * noise if self.near is None else self.near.row(prefix) + self.disturbed_by * noise

    def rounded(self, prefix: tuple[int, ...], shape: int) -> Tensor:
        """Logits as a batch of that shape computes them."""
        return self.row(prefix) + self.rounding * normal((shape, *prefix)) if self.rounding else self.row(prefix)

    def open(self, prompts: Sequence[Sequence[int]]) -> HashedSession:
        """One row a prompt."""
        return HashedSession(self, [tuple(prompt) for prompt in prompts])

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Right-padded."""
        out = torch.zeros(len(sequences), max(map(len, sequences)), self.vocab_size)
        for row, ids in enumerate(sequences):
            for place in range(len(ids)):
                out[row, place] = self.rounded(tuple(ids[: place + 1]), -1)
        return out


@dataclass
class HashedSession:
    """Prefixes as tuples."""

    model: HashedModel
    prefixes: list[tuple[int, ...]]
    tree: list[list[tuple[int, ...]]] = field(default_factory=list)

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row holds."""
        return torch.tensor([len(prefix) for prefix in self.prefixes], dtype=torch.int64)

    def append(self, token_ids: Tensor, num_tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits after each appended token; entries of a tree are kept aside until one of its paths is."""
        out = torch.zeros(*token_ids.shape, self.model.vocab_size)
        above = torch.arange(-1, token_ids.shape[1] - 1).expand_as(token_ids) if parents is None else parents
        rows = zip(token_ids.tolist(), num_tokens.tolist(), above.tolist(), strict=True)
        self.tree = []
        for row, (ids, count, over) in enumerate(rows):
            entries: list[tuple[int, ...]] = []
            for place, token in enumerate(ids[:count]):
                entries.append((*(entries[over[place]] if over[place] >= 0 else self.prefixes[row]), token))
                out[row, place] = self.model.rounded(entries[-1], len(self.prefixes))
            self.tree.append(entries)
            if parents is None and entries:
                self.prefixes[row] = entries[-1]
        return out

    def keep(self, places: Tensor, num_kept: Tensor) -> None:
        """The path that ends in the last place."""
        for row, (path, count) in enumerate(zip(places.tolist(), num_kept.tolist(), strict=True)):
            self.prefixes[row] = self.tree[row][path[count - 1]] if count else self.prefixes[row]

    def rollback(self, lengths: Tensor) -> None:
        """Drop the last tokens."""
        self.prefixes = [prefix[:kept] for prefix, kept in zip(self.prefixes, lengths.tolist(), strict=True)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]


def detokenize(ids: Sequence[int]) -> str:
    """Two letters a token."""
    return "".join(f"{chr(97 + token)}{'xyz'[token % 3]}" for token in ids)


def subject(decoder: Decoder | None = None, engine: Engine | None = None, *, rounding: float = 0.0) -> Subject:
    """A healthy decoder over hashed models and sixteen prompts, or the one given."""
    target = HashedModel(rounding=rounding)
    draft = HashedModel("draft", seed=1, near=HashedModel(), rounding=rounding)
    decoder = decoder or Decoder(target=target, drafter=DraftModel(draft, VOCAB_SIZE), detokenize=detokenize)
    prompts = tuple(
        EncodedPrompt(id=f"p{number}", domain="test", token_ids=tuple(range(number, number + 1 + number % 3)))
        for number in range(16)
    )
    return Subject(
        engine=engine or ReferenceEngine(decoder),
        target=target,
        draft=draft,
        prompts=prompts,
        decoder=decoder,
        rule="chain",
    )


def answered(check: Check, asked_of: Subject, plan: Plan) -> ScoredTraces:
    """Everything that the check asks, decoded and scored."""
    scored = ScoredTraces()
    for requests in check.rounds(asked_of, plan):
        traces = list(asked_of.engine.decode(requests))
        scored = scored.merge(
            score(traces, target=asked_of.target, draft=asked_of.draft, stages=asked_of.rule == "chain")
        )
    return scored


def concluded(check: Check, asked_of: Subject, plan: Plan) -> CheckResult:
    """What the check says about the subject."""
    return check.conclude(asked_of, plan, answered(check, asked_of, plan))
