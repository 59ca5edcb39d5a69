"""How far the target's logits move between execution shapes that are all legitimate: the measured numerical noise.

Note [Numerical noise]: the same weights give slightly different logits when a token is computed alone, in a chunk of
drafts, in a batch, or in one pass. If an engine's logits stay within B of the scorer's, a greedy engine can only emit a
token whose logit is within 2B of the largest. B is measured on the pair itself; nothing else is tolerated.

2B is a theorem and coarse: B is the largest movement of any logit. What decides a flip is how the difference of two logits
moves, and its standard deviation s is far smaller. So a token further than 6s below the first choice is suspicious: not proof,
since tails are what they are, but two of them are (`greedy` holds their number against the normal tail).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from specverify.models import LanguageModel

__all__ = ["Noise", "measured_noise"]


@dataclass(frozen=True)
class Noise:
    """Logit differences against one pass over the whole text."""

    largest: float
    """B: the largest difference of any logit, in any shape."""
    margin_sd: float
    """s: standard deviation of the difference of (largest minus second largest) logit."""
    num_positions: int

    @property
    def suspicious_gap(self) -> float:
        """6s: further below the largest logit a token lies once in 10^9, if differences move normally."""
        return 6 * self.margin_sd

    @property
    def allowed_gap(self) -> float:
        """2B: how far below the largest logit an emitted greedy token may lie."""
        return 2 * self.largest


@torch.inference_mode()
def measured_noise(target: LanguageModel, texts: Sequence[Sequence[int]], *, chunk: int) -> Noise:
    """Decode `texts` token by token alone, token by token in a batch, and in chunks; compare with one pass."""
    rows = [list(text) for text in texts]
    whole = target.logits(rows)
    together = _decoded(target, rows, 1)
    differences, margins = [], []
    for row, text in enumerate(rows):
        expected = whole[row, 1 : len(text)].double()
        shapes = [_decoded(target, [text], 1)[0], _decoded(target, [text], chunk)[0], together[row]]
        for actual in shapes:
            differences.append((actual[: len(expected)].double() - expected).abs().amax())
            margins.append(_margin(actual[: len(expected)].double()) - _margin(expected))
    moved = torch.cat(margins)
    return Noise(float(torch.stack(differences).max()), float(moved.std()) if len(moved) > 1 else 0.0, len(moved))


def _margin(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    top = logits.topk(2, -1).values
    return top[:, 0] - top[:, 1]


def _decoded(target: LanguageModel, texts: list[list[int]], chunk: int) -> Float[Tensor, "batch n vocab"]:
    """Logits after every token but the first, appended `chunk` at a time to a cache."""
    session = target.open([text[:1] for text in texts])
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=target.device)
    lengths = torch.tensor([len(text) for text in texts], device=target.device)
    parts = []
    for start in range(1, longest, chunk):
        block = padded[:, start : start + chunk]
        parts.append(session.append(block, (lengths - start).clamp(0, block.shape[1])))
    return torch.cat(parts, 1)
