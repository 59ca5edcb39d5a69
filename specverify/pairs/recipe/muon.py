"""Muon [Jordan2024] in fp32, matrices of one shape orthogonalised together: fast on a CPU, where torch's own runs in bf16."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Float
    from torch import Tensor

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest semi-orthogonal matrix as the step."""

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes a closure that returns a loss
        """One step for every matrix."""
        del closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = []
                for matrix in matrices:
                    assert matrix.grad is not None
                    buffer = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                    buffer.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, _orthogonal(torch.stack(updates)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def _orthogonal(stack: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Five Newton-Schulz steps towards U V^T."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
