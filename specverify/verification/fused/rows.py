"""Fused rules on the CPU: one row at a time in buffers that stay in cache, each read once, and none after a rejection.

Note [Filtered decisions]: rows are exponentiated in float32, so p(x) has a relative error below `_ROUNDING`. Where the
uniform lies nearer than that to its threshold, the two rows are taken again in float64 and decide. So the number of
accepted tokens is exactly that of `chain_rejection`, and float64 costs nothing: it is needed once in 30,000 rows.

Note [The fastest exponential]: torch's softmax of one row, written over a buffer in cache, takes 0.6 of the time of its
`exp` (its loop uses an exponential of 20 ulp). It is used for that; nothing here is a full softmax of a block.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.errors import InternalError, NonFiniteLogits
from specverify.verification import Verification
from specverify.verification.fused.cutoff import cut_off
from specverify.verification.fused.proposal import PLAIN, LogitsProposal, Uniforms, require_usable

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from specverify.records import SamplingParams

__all__ = ["chain_rejection", "greedy", "sample_and_match"]

_CHUNK = 256
"""Ids in a leaf of the two-level search."""
_ROUNDING = 2.0**-15
"""Of p(x)/q(x), relative. Each law: exponential 20 ulp and its mean in the sum (5e-6), rounding of score minus maximum
(at most 2^-24 * 88 = 5e-6), sums of 256 in 16 lanes and of chunks in float64 (1e-6); twice, for a ratio."""
_SMALLEST = 1e-30
"""Below it float32 nears its denormals, and float64 decides."""


_buffers = threading.local()


def _buffer(vocab_size: int, role: str) -> Float[Tensor, " padded"]:
    """Zero past the vocabulary; the last one of each role is kept, for fresh memory costs as much as what is done in it."""
    kept: tuple[int, Tensor] | None = getattr(_buffers, role, None)
    if kept is None or kept[0] != vocab_size:
        kept = vocab_size, torch.zeros(-(-vocab_size // _CHUNK) * _CHUNK)
        setattr(_buffers, role, kept)
    return kept[1]


class _Row:
    """The law of one row of logits in a buffer of float32, and what it sums to."""

    def __init__(self, vocab_size: int, params: SamplingParams, role: str) -> None:
        self.weights = _buffer(vocab_size, role)
        self.chunks = self.weights.view(-1, _CHUNK)
        self.total = 1.0
        self._vocab_size, self._params, self._role = vocab_size, params, role
        self._shown = self.weights[:vocab_size]

    def read(self, logits: Float[Tensor, " vocab"], row: int, place: int) -> None:
        """The law after these logits; `NonFiniteLogits` where there is none."""
        torch.softmax(self._scores(logits), -1, out=self._shown)
        self.total = float(self.chunks.sum(-1).sum(dtype=torch.float64))
        if not self.total > 0:  # NaN, +inf, or no id at all
            msg = (
                f"the {self._role}'s logits at place {place} of row {row} give no distribution (NaN, +inf, or no id "
                "that may be emitted); check the weights, or the sampling parameters"
            )
            raise NonFiniteLogits(msg)

    def read_with_sum(self, logits: Float[Tensor, " vocab"], log_sum: float) -> None:
        """The same where the sum is known."""
        torch.sub(self._scores(logits), log_sum, out=self._shown)
        self._shown.exp_()
        self.total = 1.0

    def prob(self, token: int) -> float:
        """Of one id."""
        return float(self.weights[token]) / self.total

    def exact_prob(self, logits: Float[Tensor, " vocab"], token: int) -> float:
        """Of one id, in float64 as `sampling.probabilities` has it; overwrites the buffer, so read again what goes on."""
        return float(self._scores(logits).double().softmax(-1)[token])

    def score(self, logits: Float[Tensor, " vocab"], token: int) -> float:
        """Of one id, after the temperature."""
        return float(logits[token : token + 1].float() / self._params.temperature)

    def _scores(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """In float32 after the sampling parameters: the row itself where nothing is to be done to it."""
        params = self._params
        if logits.dtype != torch.float32:
            logits = self._shown.copy_(logits)
        if params.temperature != 1:
            logits = torch.div(logits, params.temperature, out=self._shown)
        return cut_off(logits, params, out=self._shown)

    def remove(self, other: _Row) -> None:
        """[p - q]+, not normalised; p itself where nothing is left."""
        self.weights.sub_(other.weights, alpha=self.total / other.total).clamp_(min=0)

    def drawn(self, uniform: float) -> int | None:
        """The id whose interval of the cumulative weights holds `uniform`; None where all weights are 0."""
        masses = self.chunks.sum(-1).double()
        chunk, inside = _searched(masses, uniform)
        if chunk is None:
            return None
        weights = self.chunks[chunk].double()
        token, _ = _searched(weights, inside)
        assert token is not None  # a chunk of positive mass has an id of positive weight
        return chunk * _CHUNK + token


def _searched(masses: Float[Tensor, " n"], uniform: float) -> tuple[int | None, float]:
    """The place whose interval holds `uniform`, one of positive mass, and where in it: that place's own uniform."""
    sums = masses.cumsum(-1)
    total = float(sums[-1])
    if not total > 0:
        return None, 0.0
    wanted = torch.tensor(uniform * total, dtype=torch.float64)
    place = min(int(torch.searchsorted(sums, wanted, right=True)), int(torch.searchsorted(sums, sums[-1])))
    mass = float(masses[place])
    return place, min(max((float(wanted) - (float(sums[place]) - mass)) / mass, 0.0), 1.0)


@dataclass(frozen=True)
class _Block:
    """What the rules have in common: the rows in use, and a buffer for each model."""

    target_logits: Float[Tensor, "batch k_plus_1 vocab"]
    proposal: LogitsProposal
    target: _Row
    draft: _Row
    vocab_size: int

    @staticmethod
    def of(
        proposal: LogitsProposal,
        target_logits: Float[Tensor, "batch k_plus_1 padded"],
        params: SamplingParams,
        vocab_size: int | None,
    ) -> _Block:
        require_usable(params)
        if torch.float64 in {target_logits.dtype, proposal.draft_logits.dtype}:
            msg = "fused rules take float32, float16 or bfloat16; float64 logits go to verification.chain"
            raise InternalError(msg)
        size = target_logits.shape[-1] if vocab_size is None else vocab_size
        rows = _Row(size, params, "target"), _Row(size, params, "draft")
        return _Block(target_logits[..., :size], proposal, *rows, size)

    def draft_logits(self, row: int, place: int) -> Float[Tensor, " vocab"]:
        return self.proposal.draft_logits[row, place, : self.vocab_size]


@torch.inference_mode()
def chain_rejection(
    proposal: LogitsProposal,
    target_logits: Float[Tensor, "batch k_plus_1 padded"],
    choices: Uniforms,
    params: SamplingParams = PLAIN,
    *,
    vocab_size: int | None = None,
) -> Verification:
    """`verification.chain.chain_rejection` of the laws of these logits [Leviathan2023, Alg. 1].

    Ids from `vocab_size` on are padding of the output layers, and never emitted. Raises `NonFiniteLogits`.
    """
    if params.greedy:
        return greedy(proposal, target_logits, choices, params, vocab_size=vocab_size)
    block = _Block.of(proposal, target_logits, params, vocab_size)
    batch, most = proposal.token_ids.shape
    places = torch.arange(most + 1).expand(batch, -1)
    uniforms = choices.uniform(Stream.ACCEPT, places[:, :most]).tolist()
    ends = {stream: choices.uniform(stream, places).tolist() for stream in (Stream.RESIDUAL, Stream.BONUS)}
    accepted, next_ids = [], []
    for row, (ids, count) in enumerate(
        zip(proposal.token_ids.tolist(), proposal.num_draft_tokens.tolist(), strict=True)
    ):
        place = 0
        while place < count and _accepts(block, row, place, ids[place], uniforms[row][place]):
            place += 1
        if place < count:
            token = _replacement(block, row, place, ends[Stream.RESIDUAL][row][place])
        else:
            token = _target_draw(block, row, place, ends[Stream.BONUS][row][place])
        accepted.append(place)
        next_ids.append(token)
    return Verification(torch.tensor(accepted), torch.tensor(next_ids))


def _accepts(block: _Block, row: int, place: int, token: int, uniform: float) -> bool:
    """Whether u < p(x)/q(x); see Note [Filtered decisions]. Leaves both laws in their buffers where the sum is unknown."""
    target, draft = block.target_logits[row, place], block.draft_logits(row, place)
    if not 0 <= token < block.vocab_size:
        return False  # padding has no probability
    block.target.read(target, row, place)
    sums, p = block.proposal.draft_log_sums, block.target.prob(token)
    if sums is None:
        block.draft.read(draft, row, place)
        q = block.draft.prob(token)
    else:
        q = math.exp(block.draft.score(draft, token) - float(sums[row, place]))
    unsure = min(p, q) < _SMALLEST or abs(p - uniform * q) <= _ROUNDING * p
    if not unsure:
        return uniform * q < p
    p = block.target.exact_prob(target, token)
    if sums is None:
        q = block.draft.exact_prob(draft, token)
        block.draft.read(draft, row, place)
    block.target.read(target, row, place)
    return p > 0 if p >= q else uniform < p / q


def _replacement(block: _Block, row: int, place: int, uniform: float) -> int:
    """From norm [p - q]+ of the rejected token's own row, which is still in cache; from p where rounding leaves nothing."""
    if not 0 <= int(block.proposal.token_ids[row, place]) < block.vocab_size:
        block.target.read(block.target_logits[row, place], row, place)
        block.draft.read(block.draft_logits(row, place), row, place)
    sums = block.proposal.draft_log_sums
    if sums is not None:
        block.draft.read_with_sum(block.draft_logits(row, place), float(sums[row, place]))
    block.target.remove(block.draft)
    token = block.target.drawn(uniform)
    return _target_draw(block, row, place, uniform) if token is None else token


def _target_draw(block: _Block, row: int, place: int, uniform: float) -> int:
    """The target's own token."""
    block.target.read(block.target_logits[row, place], row, place)
    token = block.target.drawn(uniform)
    assert token is not None  # `read` has seen a positive sum
    return token


@torch.inference_mode()
def sample_and_match(
    proposal: LogitsProposal,
    target_logits: Float[Tensor, "batch k_plus_1 padded"],
    choices: Uniforms,
    params: SamplingParams = PLAIN,
    *,
    vocab_size: int | None = None,
) -> Verification:
    """`verification.chain.sample_and_match`: the target's own draw at each place, while the draft guessed it."""
    if params.greedy:
        return greedy(proposal, target_logits, choices, params, vocab_size=vocab_size)
    block = _Block.of(proposal, target_logits, params, vocab_size)
    batch, most = proposal.token_ids.shape
    uniforms = choices.uniform(Stream.TARGET, torch.arange(most + 1).expand(batch, -1)).tolist()
    return _matched(block, lambda row, place: _target_draw(block, row, place, uniforms[row][place]))


@torch.inference_mode()
def greedy(
    proposal: LogitsProposal,
    target_logits: Float[Tensor, "batch k_plus_1 padded"],
    choices: Uniforms,
    params: SamplingParams = PLAIN,
    *,
    vocab_size: int | None = None,
) -> Verification:
    """`verification.chain.greedy`: accept while the draft is the target's largest logit, ties to the lowest id."""
    del choices
    block = _Block.of(proposal, target_logits, params, vocab_size)
    return _matched(block, lambda row, place: _largest(block.target_logits[row, place], row, place))


def _largest(logits: Float[Tensor, " vocab"], row: int, place: int) -> int:
    largest = logits.amax()
    if not bool(largest.isfinite()):
        msg = f"the target's largest logit at place {place} of row {row} is {float(largest)}; check the weights"
        raise NonFiniteLogits(msg)
    return int((logits == largest).byte().argmax())  # the first of equal ones


def _matched(block: _Block, wanted: Callable[[int, int], int]) -> Verification:
    """Accept while the draft is what is wanted, then emit what is wanted; nothing after that is asked."""
    accepted, next_ids = [], []
    counts = block.proposal.num_draft_tokens.tolist()
    for row, (ids, count) in enumerate(zip(block.proposal.token_ids.tolist(), counts, strict=True)):
        place = 0
        while (token := wanted(row, place)) == ([*ids[:count], None])[place]:
            place += 1
        accepted.append(place)
        next_ids.append(token)
    return Verification(torch.tensor(accepted), torch.tensor(next_ids))
