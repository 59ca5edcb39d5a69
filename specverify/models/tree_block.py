"""A block of tokens that is a tree, as the KV cache sees it: NumPy on the host, like the cache's own bookkeeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.tree import ancestors, depths, require_path

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from numpy import ndarray
    from torch import Tensor

__all__ = ["TreeBlock"]


class TreeBlock:
    """What each entry of a block sees of it, from the place of each entry's parent."""

    def __init__(self, parents: Int[Tensor, "batch block"], num_tokens: Int[ndarray, " batch"]) -> None:
        used = np.arange(parents.shape[1]) < num_tokens[:, None]
        self._parents = torch.where(torch.from_numpy(used), parents.cpu(), -1)
        self._num_tokens = torch.from_numpy(num_tokens)
        above = ancestors(self._parents)
        self.sees: Bool[ndarray, "batch block block"] = above.numpy()
        self.depths: Int[ndarray, "batch block"] = np.where(used, depths(above).numpy(), -1)

    @property
    def height(self) -> Int[ndarray, " batch"]:
        """Tokens of the longest path of each row."""
        return self.depths.max(axis=1, initial=-1) + 1

    def path(
        self, places: Int[ndarray, "batch depth"], num_kept: Int[ndarray, " batch"]
    ) -> Bool[ndarray, "batch block"]:
        """Which entries are kept; raises `InternalError` unless they are a path from a root."""
        require_path(self._parents, self._num_tokens, torch.from_numpy(places), torch.from_numpy(num_kept))
        kept = np.zeros(self.depths.shape, dtype=bool)
        row, place = np.nonzero(np.arange(places.shape[1]) < num_kept[:, None])
        kept[row, places[row, place]] = True
        return kept
