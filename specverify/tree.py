"""The shape of a tree of tokens, from the place of each entry's parent (-1: it follows what came before the tree)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specverify.errors import InternalError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

__all__ = ["ancestors", "depths", "paths", "require_path"]


def ancestors(parents: Int[Tensor, "batch n"]) -> Bool[Tensor, "batch n n"]:
    """Whether entry i is entry j or comes after it, at [b, i, j].

    Raises `InternalError` where an entry does not come after its parent, which is what makes the order of places an
    order of tokens along every path.
    """
    places = torch.arange(parents.shape[1], device=parents.device)
    if bool(((parents < -1) | (parents >= places)).any()):
        msg = f"a tree has parents {parents.tolist()}, but a parent must stand before its children, or be -1"
        raise InternalError(msg)
    above = torch.eye(len(places), dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    for place in range(1, len(places)):
        inherited = above.gather(1, parents[:, place, None, None].clamp(min=0).expand(-1, 1, len(places)))[:, 0]
        above[:, place] |= inherited & (parents[:, place, None] >= 0)
    return above


def depths(above: Bool[Tensor, "batch n n"]) -> Int[Tensor, "batch n"]:
    """How many entries stand over each: 0 for a root."""
    return above.sum(-1) - 1


def paths(above: Bool[Tensor, "batch n n"]) -> Int[Tensor, "batch n n"]:
    """Places on the way from the root to each entry, itself the last; whatever stands after it is not on the way."""
    return torch.argsort((~above).byte(), dim=-1, stable=True)


def require_path(
    parents: Int[Tensor, "batch n"],
    num_entries: Int[Tensor, " batch"],
    places: Int[Tensor, "batch depth"],
    num_kept: Int[Tensor, " batch"],
) -> None:
    """Raise `InternalError` unless `places[b, : num_kept[b]]` leads from a root of row b's tree, entry by entry."""
    parents, places = torch.nn.functional.pad(parents, (0, 1)), places.clamp(-1, parents.shape[1])
    on_path = torch.arange(places.shape[1], device=places.device) < num_kept[:, None]
    before = torch.nn.functional.pad(places, (1, 0), value=-1)[:, :-1]
    follows = (places >= 0) & (places < num_entries[:, None]) & (parents.gather(1, places.clamp(min=0)) == before)
    wrong = (on_path & ~follows).any(1)
    if bool(wrong.any()):
        row = int(wrong.byte().argmax())
        chosen = places[row, : int(num_kept[row])].tolist()
        msg = f"row {row} is to keep the entries {chosen} of its tree, which are no path from a root"
        raise InternalError(msg)
