"""Hypothesis strategies: pairs of tables on which rules go wrong, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from specverify.models.table import TableModel, random_table

__all__ = ["Instance", "instances"]


@dataclass(frozen=True)
class Instance:
    """A target, a draft, and how a decode over them is asked for."""

    target: TableModel
    draft: TableModel
    num_speculative_tokens: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]


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
    return Instance(target, draft, draw(st.integers(1, 2)), tokens, eos)
