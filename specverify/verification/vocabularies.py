"""Two vocabularies: the law of a draft over the target's ids, and drafts that go through their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.errors import PairError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["intersected", "require_map", "round_trip", "shared_ids", "target_ids_from_offsets"]

_NOT_SHARED = -1
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes a part of a character to."""


def shared_ids(
    draft_tokens: Mapping[str, int], target_tokens: Mapping[str, int], draft_vocab_size: int
) -> Int[Tensor, " draft_vocab"]:
    """The target's id of each of the draft's, where both tokenizers have the same token string; -1 elsewhere [Timor2025]."""
    target_ids = torch.full((draft_vocab_size,), _NOT_SHARED)
    for token in draft_tokens.keys() & target_tokens.keys():
        if draft_tokens[token] < draft_vocab_size:
            target_ids[draft_tokens[token]] = target_tokens[token]
    return target_ids


def target_ids_from_offsets(offsets: Int[Tensor, " draft_vocab"]) -> Int[Tensor, " draft_vocab"]:
    """The target's ids of a reduced draft vocabulary, from what each has to be moved by (EAGLE-3's `d2t`)."""
    return torch.arange(len(offsets), device=offsets.device) + offsets


def require_map(target_ids: Int[Tensor, " draft_vocab"]) -> None:
    """Raise `PairError` where no id is shared, or two are mapped to one, whose law would be lost."""
    ids = target_ids[target_ids >= 0]
    if len(ids) and len(set(ids.tolist())) == len(ids):
        return
    what = "two ids of the draft are one" if len(ids) else "no id of the draft is one"
    msg = f"{what} of the target's, so nothing can be drafted by id; draft through the text (--drafter text)"
    raise PairError(msg)


def intersected(
    draft_probs: Float[Tensor, "*rows draft_vocab"], target_ids: Int[Tensor, " draft_vocab"], vocab_size: int
) -> Float[Tensor, "*rows vocab"]:
    """q'(v) = q(v) / Z for the target's ids v that the draft has, too, and 0 for the others [Timor2025, Alg. 4].

    A draft must be *drawn* from q', and q' be its reported law: then every rule is as lossless as with one vocabulary, and
    the residual covers what the draft can't say. Where q has no mass on a shared id, q' is uniform over the shared ones:
    any law does, as long as drafts are drawn from it. Raises what `require_map` raises.
    """
    require_map(target_ids)
    shared = target_ids >= 0
    mass = draft_probs[..., shared].double()
    mass = torch.where(mass.sum(-1, keepdim=True) > 0, mass, 1)
    law = mass.new_zeros(*mass.shape[:-1], vocab_size)
    return law.index_copy(-1, target_ids[shared], mass / mass.sum(-1, keepdim=True))


def round_trip(
    draft_ids: Sequence[int],
    *,
    said: Sequence[int],
    decode_draft: Callable[[Sequence[int]], str],
    decode_target: Callable[[Sequence[int]], str],
    encode_target: Callable[[str], Sequence[int]],
    look_behind: int = 8,
) -> tuple[int, ...]:
    """A draft in the target's ids, by way of its text: point masses, for any rule over chains.

    The end of what was `said` is encoded together with the draft's text, so that they merge as they would in one text: as
    much of it, up to `look_behind` ids, as the encoding gives back unchanged. What more text could still change is cut off:
    the last id, and before it a character of which the draft holds a part. The tokenizers' functions add no special ids
    and skip none. Whatever this gives, verification stays lossless; a bad guess is only refused.
    """
    text = decode_draft(draft_ids).rstrip(_INCOMPLETE)
    tail = tuple(said[max(0, len(said) - look_behind) :])
    encoded = tuple(encode_target(decode_target(tail) + text))
    while encoded[: len(tail)] != tail:
        tail = tail[1:]
        encoded = tuple(encode_target(decode_target(tail) + text))
    return encoded[len(tail) : -1]
