"""The randomised probability integral transform: tokens to numbers that are uniform exactly where the law is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["randomised_pit"]


def randomised_pit(
    law: Float[Tensor, "n vocab"], key: Float[Tensor, "n vocab"], at: Int[Tensor, "n 1"], jitter: Float[Tensor, "n 1"]
) -> Float[Tensor, " n"]:
    """F(x-) + V law(x) of the token `at`, with ids ordered by falling `key`, ties by rising id [Czado2009]."""
    key_x = key.gather(-1, at)
    ids = torch.arange(law.shape[-1], device=law.device)
    before = (key > key_x) | ((key == key_x) & (ids < at))
    below = torch.where(before, law, 0).sum(-1, keepdim=True)
    return (below + jitter * law.gather(-1, at)).clamp(0, 1)[:, 0]
