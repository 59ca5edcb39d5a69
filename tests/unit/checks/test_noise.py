"""The measured noise is that of whole texts at their own positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from specverify.checks.noise import measured_noise
from specverify.models.hashed import HashedModel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

TEXTS = [tuple(range(1, length)) for length in (5, 12, 20, 30)]


@dataclass(frozen=True, eq=False)
class FarOut(HashedModel):
    """Its shapes differ from the 24th token on only, as rotary positions in low precision do."""

    def rounded(self, prefix: tuple[int, ...], shape: int) -> Float[Tensor, " vocab"]:
        return super().rounded(prefix, shape) if len(prefix) > 24 else self.row(prefix)


def test_equal_shapes_have_no_noise() -> None:
    assert measured_noise(HashedModel(), TEXTS, chunk=4).largest == 0


@pytest.mark.parametrize("size", [1e-3, 1e-2])
def test_it_is_as_large_as_the_disturbance(size: float) -> None:
    """Two shapes differ by sqrt(2) normals of that size, the largest of some thousand by several."""
    noise = measured_noise(HashedModel(rounding=size), TEXTS, chunk=4)
    assert 2 * size < noise.largest < 10 * size
    assert noise.allowed_gap == 2 * noise.largest


def test_positions_are_those_of_the_text() -> None:
    """Noise that begins far out is seen, because a text is not moved to the front before it is measured."""
    assert measured_noise(FarOut(rounding=1e-2), TEXTS, chunk=4).largest > 1e-2
    assert measured_noise(FarOut(rounding=1e-2), TEXTS[:2], chunk=4).largest == 0


def test_texts_too_short_to_measure_give_none() -> None:
    assert measured_noise(HashedModel(rounding=1.0), [(1,)], chunk=4).num_positions == 0
