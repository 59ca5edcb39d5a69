"""Counter-based uniforms: Philox4x32-10 [Salmon2011] in torch, the same bits on CPU and GPU.

A uniform is a pure function of (seed, stream, sequence, position, step). So the choices of a sequence depend neither on
the batch it is in, nor on the shard, the device, or what happened before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specverify.choices import Stream, first_of_race, inverse_cdf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Philox", "philox4x32", "race_noise", "uniform53"]

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CONSTANTS = (_MULTIPLIERS, *((_WEYL[0] * round_, _WEYL[1] * round_) for round_ in range(_ROUNDS)))
"""The multipliers, and what each round adds to the key."""
_CPU_IDS, _GPU_IDS = 2**14, 2**24
"""Ids of a race whose noise is made at once: as many as fit into a cache, and as many as fit beside a model."""
_NUMPY_CONSTANTS = np.array(_CONSTANTS, dtype=np.uint64)
_STEPS_AHEAD, _POSITIONS_AHEAD = 8, 32
"""Of a single row, made at once: a call costs more than the words of one step."""


def philox4x32(counter: Int[Tensor, "4 *shape"], key: Int[Tensor, "2 *shape"]) -> Int[Tensor, "4 *shape"]:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 [Salmon2011, §4.3]."""
    constants = torch.tensor(_CONSTANTS, dtype=torch.int64, device=counter.device)
    even, odd = _ten_rounds(counter, key, constants, flip=lambda pair: pair.flip(0))
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _ten_rounds(counter: Any, key: Any, constants: Any, *, flip: Callable[[Any], Any]) -> tuple[Any, Any]:  # noqa: ANN401 - arrays of torch or of NumPy
    """The 64-bit product of two words wraps in int64, whose *bits* are still those of the unsigned product."""
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2 are multiplied, 1 and 3 are mixed in
    constants = constants.reshape(1 + _ROUNDS, 2, *[1] * (key.ndim - 1))
    multipliers, weyls = constants[0], constants[1:]
    for round_key in (key + weyls) & _MASK32:
        product = even * multipliers
        high, low = (product >> 32) & _MASK32, product & _MASK32
        even, odd = flip(high) ^ odd ^ round_key, flip(low)
    return even, odd


def uniform53(
    seed: Int[Tensor, "*shape"],
    stream: Int[Tensor, "*shape"],
    sequence: Int[Tensor, "*shape"],
    position: Int[Tensor, "*shape"],
    step: Int[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """A 53-bit uniform in [0, 1) for each coordinate; shapes broadcast. Distinct coordinates are independent."""
    coordinates = (position, sequence, step, stream, seed)
    if seed.device.type == "cpu":
        return torch.from_numpy(_in_numpy([each.numpy() for each in coordinates]))
    return _in_torch(coordinates)


def _in_torch(coordinates: Sequence[Int[Tensor, "*shape"]]) -> Float[Tensor, "*shape"]:
    """Where the coordinates lie."""
    position, sequence, step, stream, seed = torch.broadcast_tensors(*coordinates)  # type: ignore[no-untyped-call]  # torch is untyped here
    words = philox4x32(
        torch.stack((position, sequence, step, stream)) & _MASK32, torch.stack((seed & _MASK32, (seed >> 32) & _MASK32))
    )
    return _53_bits(words[0], words[1])


def race_noise(
    seed: Int[Tensor, " rows"], sequence: Int[Tensor, " rows"], position: Int[Tensor, " rows"], *, num_ids: int
) -> Float[Tensor, "rows ids"]:
    """A uniform for each id at each coordinate, two from a block of the generator.

    The block's number, from 1 on, has the place of a step in the `TARGET` stream, whose draws all stand at step 0.
    """
    block = torch.arange(1, (num_ids + 1) // 2 + 1, device=seed.device)
    shape = (len(seed), len(block))
    counter = (position[:, None], sequence[:, None], block, torch.full_like(block, Stream.TARGET))
    words = philox4x32(
        torch.stack([word.expand(shape) for word in counter]) & _MASK32,
        torch.stack((seed & _MASK32, (seed >> 32) & _MASK32))[..., None].expand(2, *shape),
    )
    pairs = torch.stack((_53_bits(words[0], words[1]), _53_bits(words[2], words[3])), -1)
    return pairs.flatten(1)[:, :num_ids]


def _53_bits(high: Int[Tensor, "*shape"], low: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A uniform from the upper 27 and 26 bits of two words."""
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def _in_numpy(coordinates: Sequence[Int[np.ndarray, "*shape"]]) -> Float[np.ndarray, "*shape"]:
    """The same in NumPy: a step needs a handful of words, and there an operation on them costs a third."""
    words = np.empty((5, *np.broadcast_shapes(*(each.shape for each in coordinates))), dtype=np.int64)
    for place, coordinate in enumerate(coordinates):
        words[place] = coordinate
    words = words.view(np.uint64)
    key = np.array((words[4] & _MASK32, words[4] >> 32))
    even, odd = _ten_rounds(words[:4] & _MASK32, key, _NUMPY_CONSTANTS, flip=lambda pair: pair[::-1])
    return np.asarray(((even[0] >> 5) * 2**26 + (odd[0] >> 6)) * 2.0**-53)


def _uniforms_of(
    seed: Int[Tensor, " batch"],
    sequence: Int[Tensor, " batch"],
    position: Int[Tensor, " batch"],
    step: Int[Tensor, " batch"],
    window: int,
) -> Float[Tensor, "batch streams window"]:
    """All streams at `window` positions from each row's own."""
    streams = torch.arange(len(Stream), device=seed.device)[:, None]
    steps = torch.where(streams == Stream.TARGET, 0, step[:, None, None])
    positions = position[:, None, None] + torch.arange(window, device=seed.device)
    return uniform53(seed[:, None, None], streams, sequence[:, None, None], positions, steps)


@lru_cache(maxsize=4)
def _ahead(seed: int, sequence: int, positions: int, steps: int, window: int) -> Float[Tensor, "steps streams places"]:
    """One row's at these blocks of positions and of steps."""
    step = torch.arange(_STEPS_AHEAD) + steps * _STEPS_AHEAD
    seeds, sequences, firsts = (torch.full_like(step, each) for each in (seed, sequence, positions * _POSITIONS_AHEAD))
    return _uniforms_of(seeds, sequences, firsts, step, _POSITIONS_AHEAD + window)


@dataclass(frozen=True)
class Philox:
    """Choices for a batch of sequences, bound to where each one stands.

    `seed` and `sequence` say who a row is; `position` is the index in the sequence of the next token to emit and `step`
    counts the draft-and-verify steps, so that a position that is drafted again gets fresh uniforms. The `TARGET` stream
    ignores `step`. `window` offsets of all streams are computed at once, on first use.
    """

    seed: Int[Tensor, " batch"]
    sequence: Int[Tensor, " batch"]
    position: Int[Tensor, " batch"]
    step: Int[Tensor, " batch"]
    window: int = 8

    @staticmethod
    def start(seed: Int[Tensor, " batch"], sequence: Int[Tensor, " batch"], *, window: int = 8) -> Philox:
        """At the first token of the first step."""
        zeros = torch.zeros_like(sequence)
        return Philox(seed, sequence, zeros, zeros, window)

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Philox:
        """The same sequences, standing elsewhere."""
        return Philox(self.seed, self.sequence, position, step, self.window)

    def select(self, rows: Int[Tensor, " rows"]) -> Philox:
        """These rows only."""
        return Philox(self.seed[rows], self.sequence[rows], self.position[rows], self.step[rows], self.window)

    @cached_property
    def _uniforms(self) -> Float[Tensor, "batch streams window"]:
        if len(self.seed) == 1 and self.seed.device.type == "cpu":
            (steps, step), (positions, position) = (
                divmod(int(self.step), _STEPS_AHEAD),
                divmod(int(self.position), _POSITIONS_AHEAD),
            )
            ahead = _ahead(int(self.seed), int(self.sequence), positions, steps, self.window)
            return ahead[step : step + 1, :, position : position + self.window]
        return _uniforms_of(self.seed, self.sequence, self.position, self.step, self.window)

    def uniform(
        self, stream: Stream | Int[Tensor, "batch n"], at: Int[Tensor, " n"] | Int[Tensor, "batch n"]
    ) -> Float[Tensor, "batch n"]:
        """Uniforms at the offsets `at` (below `window`) of each row's block."""
        if isinstance(stream, Stream) and at.dim() == 1:
            return self._uniforms[:, stream].index_select(1, at)
        at = at.expand(len(self.seed), at.shape[-1])
        if isinstance(stream, Stream):
            return self._uniforms[:, stream].gather(1, at)
        return self._uniforms.flatten(1).gather(1, stream * self.window + at)

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        """True where the uniform lies strictly below `prob`: a token of probability 0 never passes, even at u = 0."""
        del leading
        return self.uniform(stream, at) < prob

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """One id from each row's law."""
        del guesses
        return inverse_cdf(probs, self.uniform(stream, at))

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        """One id from each row's law, some rows at a time: the noise of a whole vocabulary is the largest tensor here."""
        del guesses
        vocab_size = probs.shape[-1]
        rows = max(1, (_CPU_IDS if probs.device.type == "cpu" else _GPU_IDS) // vocab_size)
        keys = (self.seed[:, None], self.sequence[:, None], self.position[:, None] + at)
        seed, sequence, position = (torch.split(key.expand(probs.shape[:-1]).flatten(), rows) for key in keys)
        parts = zip(torch.split(probs.flatten(0, -2), rows), seed, sequence, position, strict=True)
        winners = [first_of_race(laws, race_noise(*key, num_ids=vocab_size)) for laws, *key in parts]
        return torch.cat(winners).view(probs.shape[:-1])
