"""Hypothesis strategies: the tables, laws, proposals, parameters and texts on which rules and decoders go wrong.

Each record prints as what a reader of a failing example needs, and nothing else; drawn values shrink towards few ids, one
row, and parameters that are off.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st

from specverify.models.table import TableModel, random_table
from specverify.records import SamplingParams
from specverify.verification import Proposal

__all__ = [
    "EOS", "Ending", "Instance", "LawPair", "Prefixed", "endings", "instances", "law_pairs", "laws", "param_sets",
    "prefixed_rows", "proposals", "shown",
]  # fmt: skip

EOS = 2


# ---------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, repr=False)
class Instance:
    """A target, a draft, and how a decode over them is asked for."""

    target: TableModel
    draft: TableModel
    num_speculative_tokens: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    drawn: str = ""
    """How the tables were made, by which they can be made again."""

    def __repr__(self) -> str:
        asked = f"num_speculative_tokens={self.num_speculative_tokens}, max_new_tokens={self.max_new_tokens}"
        return f"Instance({self.drawn}, {asked}, eos_token_ids={self.eos_token_ids})"


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Random, sparse, nearly one-hot or equal tables over 2 or 3 ids; 1 or 2 drafts; with and without an EOS."""
    vocab_size = draw(st.sampled_from([2, 3]))
    tokens = draw(st.integers(1, 3))
    zeros = draw(st.sampled_from([0.0, 0.3]))
    sharpness = draw(st.sampled_from([0.5, 1.5, 8.0]))
    seed = draw(st.integers(0, 2**20))
    equal = draw(st.booleans()) and draw(st.booleans())
    target = random_table(vocab_size, tokens + 1, seed=seed, zeros=zeros, sharpness=sharpness)
    draft = target if equal else random_table(vocab_size, tokens + 1, seed=seed + 1, zeros=zeros, sharpness=sharpness)
    eos = draw(st.sampled_from([(), (1,)]))
    drawn = f"random_table({vocab_size}, {tokens + 1}, {seed=}, {zeros=}, {sharpness=}), draft {'=' if equal else 'seed + 1'}"
    return Instance(target, draft, draw(st.integers(1, 2)), tokens, eos, drawn)


# ------------------------------------------------------------------------------------------------------------ laws


def laws(vocab_size: int) -> st.SearchStrategy[torch.Tensor]:
    """A law as shares of a small whole: zeros, ties, point masses and nearly so; sums to 1 up to rounding."""
    flat = st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size).filter(any)
    one_hot = st.integers(0, vocab_size - 1).map(lambda at: [int(place == at) for place in range(vocab_size)])
    nearly = st.integers(0, vocab_size - 1).map(lambda at: [10**9 if place == at else 1 for place in range(vocab_size)])
    return st.one_of(flat, one_hot, nearly).map(_normalised)


def _normalised(shares: list[int]) -> torch.Tensor:
    law = torch.tensor(shares, dtype=torch.float64)
    return law / law.sum()


@dataclass(frozen=True, repr=False)
class LawPair:
    """What the target and the draft say at one place."""

    target: torch.Tensor
    draft: torch.Tensor

    def __repr__(self) -> str:
        return f"LawPair(target={shown(self.target)}, draft={shown(self.draft)})"


@st.composite
def law_pairs(draw: st.DrawFn, vocab_size: int) -> LawPair:
    """Any two laws; equal ones; and two of disjoint support, where every draft must be rejected."""
    target = draw(laws(vocab_size))
    relation = draw(st.sampled_from(["any", "equal", "disjoint"]))
    if relation == "equal":
        return LawPair(target, target)
    draft = draw(laws(vocab_size))
    if relation == "disjoint" and vocab_size > 1:
        low = torch.arange(vocab_size) < vocab_size // 2
        target, draft = (torch.where(side, law + 1e-3, 0) for side, law in ((low, target), (~low, draft)))
        return LawPair(target / target.sum(), draft / draft.sum())
    return LawPair(target, draft)


def shown(law: torch.Tensor) -> list[float]:
    """A law as somebody would write it down."""
    return [round(share, 4) for share in law.tolist()]


# ------------------------------------------------------------------------------------------------------- proposals


@st.composite
def proposals(draw: st.DrawFn, vocab_size: int, *, trees: bool = False) -> Proposal:
    """One to three ragged rows of up to three drafts (or nodes); ids that their law can draw, laws that fit the tree.

    Parents come before their children; siblings share one law and differ. A row of a tree is padded with children of
    the context, whose laws are zero like those of a padded chain.
    """
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    width = max(sizes)
    ids, parents = torch.zeros(2, len(sizes), width, dtype=torch.int64)
    parents -= 1
    probs = torch.zeros(len(sizes), width, vocab_size, dtype=torch.float64)
    for row, size in enumerate(sizes):
        after = {-1: draw(laws(vocab_size))}
        free = {-1: _possible(after[-1])}
        for place in range(size):
            parent = draw(st.sampled_from([node for node in free if free[node]])) if trees else place - 1
            token = draw(st.sampled_from(free[parent]))
            free[parent].remove(token)
            ids[row, place], parents[row, place], probs[row, place] = token, parent, after[parent]
            after[place] = draw(laws(vocab_size))
            free[place] = _possible(after[place])
    return Proposal(ids, torch.tensor(sizes), probs, parents if trees else None)


def _possible(law: torch.Tensor) -> list[int]:
    """Ids of positive probability."""
    return law.nonzero()[:, 0].tolist()


# ------------------------------------------------------------------------------------------------------ parameters


def param_sets(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    """All that changes a law, alone and together; off is the first choice of each, so that examples shrink to few."""
    ids = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([1.0, 0.0, 0.5, 2.0, 1e-2]),
        top_k=st.sampled_from([0, 1, 2, vocab_size - 1, vocab_size, vocab_size + 5]),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-3]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
        no_repeat_ngram_size=st.sampled_from([0, 1, 2, 3]),
        min_new_tokens=st.sampled_from([0, 1, 2, 4]),
        banned_token_ids=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        eos_token_ids=st.sampled_from([(), (EOS,), (EOS, 0)]),
    )


@dataclass(frozen=True, repr=False)
class Prefixed:
    """One row: parameters, a text of which the first `prompt_length` tokens are the prompt, and a block's logits."""

    params: SamplingParams
    token_ids: tuple[int, ...]
    prompt_length: int
    first: int
    """Tokens before the first place of the block."""
    logits: tuple[tuple[float, ...], ...]
    """One row of logits a place; place i sees the first `first + i` tokens and none after them."""

    def __repr__(self) -> str:
        default = SamplingParams()
        changed = ", ".join(
            f"{field.name}={getattr(self.params, field.name)}"
            for field in fields(self.params)
            if getattr(self.params, field.name) != getattr(default, field.name)
        )
        prompt, rest = list(self.token_ids[: self.prompt_length]), list(self.token_ids[self.prompt_length :])
        return f"Prefixed({changed or 'all off'}; prompt {prompt} + {rest}, after {self.first}: {list(self.logits)})"


@st.composite
def prefixed_rows(draw: st.DrawFn, vocab_size: int, block: int) -> Prefixed:
    """Logits are quarters, so that ties are common and nothing lies on an edge by rounding alone."""
    token_ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=block, max_size=7))
    first = draw(st.integers(1, len(token_ids) - block + 1))
    row = st.lists(st.integers(-12, 12).map(lambda quarters: quarters / 4), min_size=vocab_size, max_size=vocab_size)
    return Prefixed(
        draw(param_sets(vocab_size)),
        tuple(token_ids),
        draw(st.integers(1, first)),
        first,
        tuple(tuple(draw(row)) for _ in range(block)),
    )


# --------------------------------------------------------------------------------------------------------- endings


@dataclass(frozen=True)
class Ending:
    """A text that a decode would say for ever, how it is drafted, and what may end it."""

    text: tuple[int, ...]
    guessed: tuple[bool, ...]
    """Whether the draft for each token is right."""
    num_speculative_tokens: int
    params: SamplingParams


@st.composite
def endings(draw: st.DrawFn, vocab_size: int) -> Ending:
    """EOS, stop ids, stop strings over the letters a, b, c, ... (also across tokens), and a limit; or none of them."""
    length = draw(st.integers(1, 8))
    token = st.integers(0, vocab_size - 1)
    text = draw(st.lists(token, min_size=length, max_size=length))
    some = st.lists(token, max_size=2, unique=True).map(tuple)
    string = st.text("abcdefgh"[:vocab_size], min_size=1, max_size=3)
    params = SamplingParams(
        temperature=0,
        max_new_tokens=draw(st.integers(1, length)),
        eos_token_ids=draw(some),
        stop_token_ids=draw(some),
        stop_strings=tuple(draw(st.lists(string, max_size=2, unique=True))),
    )
    guessed = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return Ending(tuple(text), tuple(guessed), draw(st.integers(1, 4)), params)
