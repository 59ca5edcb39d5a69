"""Twenty pairs of tables on which rules go wrong, in one pair of tables: the first tokens of a prompt say which is meant.

All pairs of a rule are then enumerated in one batch. Every law depends on the whole prefix.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from specverify.decoding import Decoder
from specverify.drafting import TREES, drafter_for
from specverify.law import Law, autoregressive_law, decoded_laws, greedy_law, total_variation
from specverify.models.table import TableModel, random_table
from specverify.records import DecodeRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from specverify.context import Context
    from specverify.drafting import Drafter, Drafting
    from specverify.verification import Proposal
    from specverify.verification.rules import NamedRule

__all__ = [
    "BRANCHING",
    "NUM_PAIRS",
    "NUM_RANDOM_PAIRS",
    "StopsAtUnlikely",
    "VaryingLengths",
    "decoder_of",
    "distances",
    "pairs",
    "requests",
]

VOCAB_SIZE = 3
NUM_SPECULATIVE_TOKENS = 3
MAX_NEW_TOKENS = 4
EOS = 1
NUM_PAIRS = 20
NUM_RANDOM_PAIRS = 8
"""The first ones, with EOS and limits of every length among them; the others are the claim's hard cases."""
_DEPTH = MAX_NEW_TOKENS + 1
"""One level more than a right decode reads, so that a fault which goes on is judged by what it emits."""
_PROMPT_LENGTH = 3

BRANCHING = (2, 1)
"""Of trees: two siblings, each with a child. Three levels have too many paths to prove in seconds."""


# ------------------------------------------------------------------------------------------------------------ tables


def _random(seed: int, *, sharpness: float = 1.5, zeros: float = 0.0) -> TableModel:
    return random_table(VOCAB_SIZE, _DEPTH, seed=seed, sharpness=sharpness, zeros=zeros)


def _mapped(table: TableModel, change: Callable[[Tensor], Tensor]) -> TableModel:
    return replace(table, levels=tuple(change(rows).log_softmax(-1) for rows in table.levels))


def _only(table: TableModel, ids: set[int]) -> TableModel:
    """All probability on `ids`."""
    dropped = torch.tensor([token not in ids for token in range(VOCAB_SIZE)])
    return _mapped(table, lambda rows: rows.masked_fill(dropped, -torch.inf))


def _supported_as(table: TableModel, other: TableModel) -> TableModel:
    """The table with zeros where the other has them."""
    levels = zip(table.levels, other.levels, strict=True)
    return replace(
        table, levels=tuple(rows.where(its > -torch.inf, -torch.inf).log_softmax(-1) for rows, its in levels)
    )


def _with_traces(table: TableModel) -> TableModel:
    """Id 0 has probability 1e-30 everywhere."""
    trace = torch.tensor([-30 * torch.log(torch.tensor(10.0)), 0, 0])
    return _mapped(_only(table, {1, 2}), lambda rows: torch.where(trace < 0, trace, rows))


@cache
def pairs() -> tuple[tuple[str, TableModel, TableModel], ...]:
    """Random pairs, then the hard cases."""
    sparse = _random(20, zeros=0.4)
    hard = [
        ("zeros in both", _random(21, zeros=0.4), _random(22, zeros=0.4)),
        ("zeros in the target", _random(23, zeros=0.5), _random(24)),
        ("zeros in the draft", _random(25), _random(26, zeros=0.5)),
        ("ties", _mapped(_random(27), torch.round), _mapped(_random(28), torch.round)),
        ("identical supports", sparse, _supported_as(_random(29), sparse)),
        ("disjoint supports", _only(_random(30), {0, 1}), _only(_random(31), {2})),
        ("nearly one-hot", _random(32, sharpness=8), _random(33, sharpness=8)),
        ("one-hot target", _random(34, zeros=1.0), _random(35)),
        ("one-hot draft", _random(36), _random(37, zeros=1.0)),
        ("equal", _random(38), _random(38)),
        ("equal and sparse", sparse, sparse),
        ("almost impossible", _with_traces(_random(39)), _with_traces(_random(40))),
    ]
    random = [(f"random {seed}", _random(2 * seed), _random(2 * seed + 1)) for seed in range(NUM_RANDOM_PAIRS)]
    return (*random, *hard)


def _prompt(index: int) -> tuple[int, ...]:
    return tuple(index // VOCAB_SIZE**place % VOCAB_SIZE for place in reversed(range(_PROMPT_LENGTH)))


def _stacked(tables: Sequence[TableModel]) -> TableModel:
    """One table in which the laws after `_prompt(i)` are those of `tables[i]`."""
    slots = [tables[index % len(tables)] for index in range(VOCAB_SIZE**_PROMPT_LENGTH)]
    shallow = random_table(VOCAB_SIZE, _PROMPT_LENGTH - 1, seed=0).levels
    deep = (torch.cat([table.levels[length] for table in slots]) for length in range(_DEPTH + 1))
    return TableModel((*shallow, *deep))


@cache
def stacked_pairs() -> tuple[TableModel, TableModel]:
    """All targets, and all drafts."""
    return _stacked([target for _, target, _ in pairs()]), _stacked([draft for _, _, draft in pairs()])


@cache
def requests() -> tuple[DecodeRequest, ...]:
    """One a pair: up to four tokens with an EOS among the ids; every fifth has no EOS, and three have a lower limit."""
    return tuple(
        DecodeRequest(
            id=name,
            prompt_ids=_prompt(index),
            params=SamplingParams(
                max_new_tokens=min(index + 1, MAX_NEW_TOKENS),
                eos_token_ids=(EOS,) if index % 5 else (),
            ),
        )
        for index, (name, _, _) in enumerate(pairs())
    )


# ---------------------------------------------------------------------------------------------------------- drafters


@dataclass(frozen=True)
class VaryingLengths:
    """A drafter that drafts as much as the tokens before the block say: any rule that doesn't look ahead is allowed."""

    inner: Drafter

    def __call__(self, context: Context) -> Drafting:
        """Prepare the drafter itself."""
        return _Varying(self.inner(context))


@dataclass
class _Varying:
    inner: Drafting

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        said = zip(context.token_ids.tolist(), context.lengths.tolist(), strict=True)
        lengths = torch.tensor([zlib.crc32(bytes(ids[:length])) % (NUM_SPECULATIVE_TOKENS + 1) for ids, length in said])
        return self.inner.propose(context, torch.minimum(max_tokens, lengths))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.inner.select(rows)


@dataclass(frozen=True)
class StopsAtUnlikely:
    """A drafter that ends its draft at the first token which the draft model itself found unlikely."""

    inner: Drafter
    least: float
    """The lowest probability with which a draft goes on."""
    dropped: bool
    """Whether that token is left out (which looks ahead, and is lossy), or is the last one (which is right)."""

    def __call__(self, context: Context) -> Drafting:
        """Prepare the drafter itself."""
        return _StoppingAtUnlikely(self.inner(context), self.least, self.dropped)


@dataclass
class _StoppingAtUnlikely:
    inner: Drafting
    least: float
    dropped: bool

    def propose(self, context: Context, max_tokens: Int[Tensor, " batch"]) -> Proposal:
        proposal = self.inner.propose(context, max_tokens)
        probs = proposal.draft_probs.gather(-1, proposal.token_ids[..., None])[..., 0]
        likely = (probs >= self.least).long().cumprod(-1).sum(-1)
        cut = replace(
            proposal,
            num_draft_tokens=torch.minimum(proposal.num_draft_tokens, likely if self.dropped else likely + 1),
        )
        return replace(cut, draft_probs=torch.where(cut.drafted[..., None], cut.draft_probs, 0))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.inner.select(rows)


# -------------------------------------------------------------------------------------------------------------- laws


def decoder_of(named: NamedRule) -> Decoder:
    """The reference decoder over all pairs, with the drafts that the rule is right for."""
    target, draft = stacked_pairs()
    drafter = drafter_for(named.drafts, draft, VOCAB_SIZE, branching=BRANCHING)
    depth = NUM_SPECULATIVE_TOKENS if named.drafts not in TREES else len(BRANCHING)
    return Decoder(target=target, drafter=drafter, rule=named.rule, drafts=named.drafts, num_speculative_tokens=depth)


@cache
def wanted_laws(*, greedy: bool) -> tuple[Law, ...]:
    """What the target alone emits for each request."""
    law = greedy_law if greedy else autoregressive_law
    target, _ = stacked_pairs()
    return tuple(
        law(
            target,
            max_new_tokens=request.params.max_new_tokens,
            eos_token_ids=request.params.eos_token_ids,
            prompt_ids=request.prompt_ids,
        )
        for request in requests()
    )


def distances(decoder: Decoder, *, greedy: bool = False, num_pairs: int = NUM_PAIRS) -> dict[str, float]:
    """TV distance of each pair's decoded law from the target's (from the most probable text, for greedy decoding)."""
    asked = requests()[:num_pairs]
    wanted = wanted_laws(greedy=greedy)[:num_pairs]
    laws = decoded_laws(decoder, asked)
    return {request.id: total_variation(law, its) for request, law, its in zip(asked, laws, wanted, strict=True)}
