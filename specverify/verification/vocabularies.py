"""Two vocabularies: what a draft may propose where not every id of one model is an id of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.errors import PairError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["intersected", "round_trip"]


def intersected(
    draft_probs: Float[Tensor, "*rows draft_vocab"], target_ids: Int[Tensor, " draft_vocab"], vocab_size: int
) -> Float[Tensor, "*rows vocab"]:
    """The draft's law over the target's ids: q'(v) = q(v) / Z where both have v, and 0 elsewhere [Timor2025, Alg. 4].

    `target_ids` names the target's id of each of the draft's, -1 where it has none. Drafts must be *drawn* from q', and q'
    reported; a reduced draft vocabulary (EAGLE-3) is the case in which every id has one. Raises `PairError` where a law
    has no mass on shared ids.
    """
    shared = target_ids >= 0
    mass = torch.where(shared, draft_probs, 0)
    total = mass.sum(-1, keepdim=True)
    if not bool((total > 0).all()):
        msg = "the draft puts no probability on any id that the target has, too; use a draft whose tokenizer overlaps more"
        raise PairError(msg)
    law = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
    return law.index_add(-1, target_ids[shared], (mass / total)[..., shared])


def round_trip(
    draft_ids: Sequence[int],
    *,
    said: Sequence[int],
    decode_draft: Callable[[Sequence[int]], str],
    decode_target: Callable[[Sequence[int]], str],
    encode_target: Callable[[str], Sequence[int]],
) -> tuple[int, ...]:
    """A draft in the target's ids, by way of its text; point masses, for sample-and-match.

    The text so far and the draft's are encoded together, and the draft's share begins where the encoding leaves the ids
    that were `said`. Nothing is proposed where it doesn't begin there: a merge across the border would change what was
    said. The last id is left out, since more text could merge with it.
    """
    encoded = tuple(encode_target(decode_target(said) + decode_draft(draft_ids)))
    if encoded[: len(said)] != tuple(said):
        return ()
    return encoded[len(said) : -1]
