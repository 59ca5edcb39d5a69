"""Fused chain rejection on CUDA, in Triton; `TRITON_INTERPRET=1` runs the same programs in NumPy, which is how they are tested.

Note [Four programs]: `_sums` reads each row once, split over programs, for its maximum and sum of exponentials. `_scan`
takes one program a sequence: it joins the splits, draws the acceptance uniforms and finds the first rejection. `_masses`
reads the one row (pair) from which the next token comes, split again; `_draw` finds the split that holds the uniform and
reads that one. The uniforms are those of `choices.Philox`, bit by bit, so CPU and GPU decide alike: an acceptance differs
only where its uniform lies within rounding of the threshold, a token only at the border between two ids.

No figure of these on a GPU has been measured yet; `pytest -m gpu` runs them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.errors import InternalError, NonFiniteLogits
from specverify.verification import Proposal, Verification
from specverify.verification.chain import matching
from specverify.verification.fused.cutoff import cuts, least_kept
from specverify.verification.fused.proposal import PLAIN, LogitsProposal, require_usable

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from specverify.records import SamplingParams
    from specverify.verification.fused.proposal import Uniforms

__all__ = ["chain_rejection", "greedy", "keyed"]

_BLOCK, _BLOCKS_PER_SPLIT = 1024, 4
_ACCEPT, _RESIDUAL, _BONUS = (tl.constexpr(int(stream)) for stream in (Stream.ACCEPT, Stream.RESIDUAL, Stream.BONUS))


@triton.jit
def _uniform(seed, sequence, position, step, stream):
    """`choices.philox.uniform53`."""
    w0, w1, _, _ = tl.philox(
        seed, position.to(tl.uint32), sequence.to(tl.uint32), step.to(tl.uint32), stream.to(tl.uint32)
    )
    high, low = (w0 >> 5).to(tl.float64), (w1 >> 6).to(tl.float64)
    return (high * 67108864.0 + low) * 1.1102230246251565e-16  # 2^26, 2^-53


@triton.jit
def _scores(logits, offsets, inside, temperature, least, has_least: tl.constexpr):
    """Of some ids of one row after the sampling parameters; -inf outside."""
    scores = tl.load(logits + offsets, mask=inside, other=-float("inf")).to(tl.float32) / temperature
    if has_least:
        scores = tl.where(scores >= least, scores, -float("inf"))
    return scores


@triton.jit
def _sums(
    logits, stride_row, stride_place, counts, extra, least, largest, sums,
    vocab_size, temperature, n: tl.constexpr, splits: tl.constexpr, has_least: tl.constexpr,
    block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of one split of one row; rows past the drafts are not read."""
    row, place, split = tl.program_id(0) // n, tl.program_id(0) % n, tl.program_id(1)
    if place < tl.load(counts + row) + extra:
        this = logits + row.to(tl.int64) * stride_row + place.to(tl.int64) * stride_place
        cut = tl.load(least + row * n + place) if has_least else 0.0
        top, total = -float("inf"), 0.0
        for index in range(blocks):
            offsets = (split * blocks + index) * block + tl.arange(0, block)
            scores = _scores(this, offsets, offsets < vocab_size, temperature, cut, has_least)
            higher = tl.maximum(top, tl.max(scores, 0))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(scores - safe), 0)
            top = higher
        at = (row * n + place) * splits + split
        tl.store(largest + at, top)
        tl.store(sums + at, total)


@triton.jit
def _log_sum(largest, sums, at, splits: tl.constexpr, padded: tl.constexpr):
    """Of one row from its splits; NaN where the row is no law."""
    split = tl.arange(0, padded)
    tops = tl.load(largest + at * splits + split, mask=split < splits, other=-float("inf"))
    parts = tl.load(sums + at * splits + split, mask=split < splits, other=0.0)
    top = tl.max(tops, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(parts * tl.exp(tops - safe), 0)
    return tl.where(total > 0, safe + tl.log(total), float("nan"))


@triton.jit
def _scan(
    target, target_row, target_place, draft, draft_row, draft_place, token_ids, counts,
    seeds, sequences, positions, steps, target_largest, target_sums, draft_largest, draft_sums, kept_sums,
    target_least, draft_least, accepted, log_sums, uniforms, broken, vocab_size, temperature,
    k: tl.constexpr, splits: tl.constexpr, padded: tl.constexpr, keeps: tl.constexpr, has_least: tl.constexpr,
):  # fmt: skip
    """How many drafts one sequence accepts, and what the draw of its next token needs."""
    row = tl.program_id(0)
    count, seed, sequence = tl.load(counts + row), tl.load(seeds + row), tl.load(sequences + row)
    position, step = tl.load(positions + row), tl.load(steps + row)
    place, going, wrong = 0, 1, -1
    drafted = 0.0
    while going == 1:
        ours = _log_sum(target_largest, target_sums, row * (k + 1) + place, splits, padded)
        wrong = tl.where((ours != ours) & (wrong < 0), place, wrong)  # noqa: PLR0124 - NaN
        going = 0
        if place < count:
            token = tl.load(token_ids + row * k + place)
            known = (token >= 0) & (token < vocab_size)
            at = tl.where(known, token, 0)
            if keeps:
                drafted = tl.load(kept_sums + row * k + place).to(tl.float32)
            else:
                drafted = _log_sum(draft_largest, draft_sums, row * k + place, splits, padded)
            wrong = tl.where((drafted != drafted) & (wrong < 0), place, wrong)  # noqa: PLR0124 - NaN
            cut = tl.load(target_least + row * (k + 1) + place) if has_least else 0.0
            other = tl.load(draft_least + row * k + place) if has_least else 0.0
            here = target + row.to(tl.int64) * target_row + place * target_place
            there = draft + row.to(tl.int64) * draft_row + place * draft_place
            p = _scores(here, at, known, temperature, cut, has_least)
            q = _scores(there, at, known, temperature, other, has_least)
            log_ratio = (p - ours).to(tl.float64) - (q - drafted).to(tl.float64)
            stream = tl.full((), _ACCEPT, tl.int64)
            uniform = _uniform(seed, sequence, position + place, step, stream)
            possible = p > -float("inf")
            if possible & ((log_ratio >= 0.0) | (uniform < tl.exp(log_ratio))):
                place += 1
                going = 1
        tl.store(log_sums + 2 * row, ours)
    tl.store(log_sums + 2 * row + 1, drafted)
    tl.store(accepted + row, place)
    tl.store(broken + row, wrong)
    stream = tl.where(place < count, tl.full((), _RESIDUAL, tl.int64), tl.full((), _BONUS, tl.int64))
    tl.store(uniforms + row, _uniform(seed, sequence, position + place, step, stream))


@triton.jit
def _weights(
    target, draft, offsets, vocab_size, draft_size, temperature, target_log_sum, draft_log_sum,
    target_least, draft_least, has_least: tl.constexpr,
):  # fmt: skip
    """P and [p - q]+ of some ids; `draft_size` is 0 where nothing was rejected, and the draft is not read."""
    p = tl.exp(_scores(target, offsets, offsets < vocab_size, temperature, target_least, has_least) - target_log_sum)
    q = tl.exp(_scores(draft, offsets, offsets < draft_size, temperature, draft_least, has_least) - draft_log_sum)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def _masses(
    target, target_row, target_place, draft, draft_row, draft_place, counts, accepted, log_sums,
    target_least, draft_least, plain, residual, vocab_size, temperature,
    k: tl.constexpr, splits: tl.constexpr, has_least: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """What p and [p - q]+ sum to in one split of the row from which the next token comes."""
    row, split = tl.program_id(0), tl.program_id(1)
    place = tl.load(accepted + row)
    rejected = place < tl.load(counts + row)
    draft_size = tl.where(rejected, vocab_size, 0)
    ours = target + row.to(tl.int64) * target_row + place.to(tl.int64) * target_place
    theirs = draft + row.to(tl.int64) * draft_row + place.to(tl.int64) * draft_place
    cut = tl.load(target_least + row * (k + 1) + place) if has_least else 0.0
    other = tl.load(draft_least + row * k + place, mask=rejected, other=0.0) if has_least else 0.0
    all_p, all_rest = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for index in range(blocks):
        offsets = (split * blocks + index) * block + tl.arange(0, block)
        p, rest = _weights(
            ours, theirs, offsets, vocab_size, draft_size, temperature, tl.load(log_sums + 2 * row),
            tl.load(log_sums + 2 * row + 1), cut, other, has_least,
        )  # fmt: skip
        all_p += tl.sum(p, 0).to(tl.float64)
        all_rest += tl.sum(rest, 0).to(tl.float64)
    tl.store(plain + row * splits + split, all_p)
    tl.store(residual + row * splits + split, all_rest)


@triton.jit
def _draw(
    target, target_row, target_place, draft, draft_row, draft_place, counts, accepted, log_sums, uniforms,
    target_least, draft_least, plain, residual, next_ids, vocab_size, temperature,
    k: tl.constexpr, splits: tl.constexpr, padded: tl.constexpr, has_least: tl.constexpr,
    block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Inverse CDF: the split that holds the uniform, then the id in it; never an id of probability 0."""
    row, split = tl.program_id(0), tl.arange(0, padded)
    place = tl.load(accepted + row)
    rejected = place < tl.load(counts + row)
    draft_size = tl.where(rejected, vocab_size, 0)
    ours = target + row.to(tl.int64) * target_row + place.to(tl.int64) * target_place
    theirs = draft + row.to(tl.int64) * draft_row + place.to(tl.int64) * draft_place
    cut = tl.load(target_least + row * (k + 1) + place) if has_least else 0.0
    other = tl.load(draft_least + row * k + place, mask=rejected, other=0.0) if has_least else 0.0

    rest = tl.load(residual + row * splits + split, mask=split < splits, other=0.0)
    whole = tl.load(plain + row * splits + split, mask=split < splits, other=0.0)
    from_rest = tl.sum(rest, 0) > 0  # rounding may leave nothing where p = q
    masses = tl.where(from_rest, rest, whole)
    cdf = tl.cumsum(masses, 0)
    wanted = tl.load(uniforms + row) * tl.sum(masses, 0)
    last = tl.max(tl.where(masses > 0, split, -1), 0)
    chosen = tl.min(tl.where((cdf > wanted) & (masses > 0), split, last), 0)
    below = tl.sum(tl.where(split < chosen, masses, 0.0), 0)

    token, fallback = vocab_size, -1
    for index in range(blocks):
        offsets = (chosen * blocks + index) * block + tl.arange(0, block)
        p, without = _weights(
            ours, theirs, offsets, vocab_size, draft_size, temperature, tl.load(log_sums + 2 * row),
            tl.load(log_sums + 2 * row + 1), cut, other, has_least,
        )  # fmt: skip
        weights = tl.where(from_rest, without, p).to(tl.float64)
        passed = (below + tl.cumsum(weights, 0) > wanted) & (weights > 0)
        token = tl.minimum(token, tl.min(tl.where(passed, offsets, vocab_size), 0))
        fallback = tl.maximum(fallback, tl.max(tl.where(weights > 0, offsets, -1), 0))
        below += tl.sum(weights, 0)
    tl.store(next_ids + row, tl.where(token < vocab_size, token, fallback).to(tl.int64))


@torch.inference_mode()
def chain_rejection(
    proposal: LogitsProposal,
    target_logits: Float[Tensor, "batch k_plus_1 padded"],
    choices: Philox,
    params: SamplingParams = PLAIN,
    *,
    vocab_size: int | None = None,
) -> Verification:
    """`verification.chain.chain_rejection` of the laws of these logits, in four launches and one look at the host.

    Ids from `vocab_size` on are padding, and never emitted. Raises `NonFiniteLogits`.
    """
    require_usable(params)
    if params.greedy:
        return greedy(proposal, target_logits, vocab_size=vocab_size)
    draft_logits = proposal.draft_logits
    if torch.float64 in {target_logits.dtype, draft_logits.dtype}:
        msg = "fused rules take float32, float16 or bfloat16; float64 logits go to verification.chain"
        raise InternalError(msg)
    if target_logits.stride(-1) != 1 or draft_logits.stride(-1) != 1:
        target_logits, draft_logits = target_logits.contiguous(), draft_logits.contiguous()
    batch, k = proposal.token_ids.shape
    size = vocab_size or target_logits.shape[-1]
    splits = triton.cdiv(size, _BLOCK * _BLOCKS_PER_SPLIT)
    padded, shape = triton.next_power_of_2(splits), {"block": _BLOCK, "blocks": _BLOCKS_PER_SPLIT, "splits": splits}

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=target_logits.device)

    rows = [(target_logits, *target_logits.stride()[:2]), (draft_logits, *draft_logits.stride()[:2])]
    leasts = [
        least_kept(each[..., :size].float() / params.temperature, params) if cuts(params) else empty(1)
        for each in (target_logits, draft_logits)
    ]
    counts, temperature = proposal.num_draft_tokens, float(params.temperature)
    parts = [[empty(batch, n, splits) for _ in range(2)] for n in (k + 1, k)]
    for index, (n, extra) in enumerate(((k + 1, 1), (k, 0))):
        if n and not (index and proposal.draft_log_sums is not None):
            _sums[(batch * n, splits)](
                *rows[index], counts, extra, leasts[index], *parts[index], size, temperature,
                n=n, has_least=cuts(params), **shape,
            )  # fmt: skip
    kept = proposal.draft_log_sums if proposal.draft_log_sums is not None else empty(1)
    accepted, broken, next_ids = (empty(batch, dtype=torch.int64) for _ in range(3))
    log_sums, uniforms = empty(batch, 2), empty(batch, dtype=torch.float64)
    _scan[(batch,)](
        *rows[0], *rows[1], proposal.token_ids.contiguous(), counts,
        choices.seed, choices.sequence, choices.position, choices.step, *parts[0], *parts[1], kept.contiguous(),
        *leasts, accepted, log_sums, uniforms, broken, size, temperature,
        k=k, splits=splits, padded=padded, keeps=proposal.draft_log_sums is not None, has_least=cuts(params),
    )  # fmt: skip
    masses = [empty(batch, splits, dtype=torch.float64) for _ in range(2)]
    asked = (*rows[0], *rows[1], counts, accepted, log_sums)
    _masses[(batch, splits)](*asked, *leasts, *masses, size, temperature, k=k, has_least=cuts(params), **shape)
    _draw[(batch,)](
        *asked, uniforms, *leasts, *masses, next_ids, size, temperature,
        k=k, padded=padded, has_least=cuts(params), **shape,
    )  # fmt: skip
    _require_laws(broken)
    return Verification(accepted, next_ids)


def keyed(choices: Uniforms) -> Philox:
    """The choices, if a program can draw them itself; raises `InternalError` if they are not `Philox`."""
    if not isinstance(choices, Philox):
        msg = "on CUDA a fused rule draws its own uniforms, so its choices must be `Philox`"
        raise InternalError(msg)
    return choices


def _require_laws(broken: Tensor) -> None:
    """Raise `NonFiniteLogits` for the first row that gave no distribution."""
    places = broken.tolist()
    for row, place in enumerate(places):
        if place >= 0:
            msg = (
                f"the logits at place {place} of row {row} give no distribution (NaN, +inf, or no id that may be "
                "emitted); check the weights, or the sampling parameters"
            )
            raise NonFiniteLogits(msg)


@torch.inference_mode()
def greedy(
    proposal: LogitsProposal, target_logits: Float[Tensor, "batch k_plus_1 padded"], *, vocab_size: int | None = None
) -> Verification:
    """`verification.chain.greedy`, ties to the lowest id."""
    logits = target_logits[..., :vocab_size]
    largest = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    wanted = torch.where(logits == largest, ids, len(ids)).amin(-1)
    looked_at = torch.arange(wanted.shape[1], device=wanted.device) <= proposal.num_draft_tokens[:, None]
    broken = looked_at & ~largest[..., 0].isfinite()
    _require_laws(torch.where(broken.any(-1), broken.byte().argmax(-1), -1))
    return matching(Proposal(proposal.token_ids, proposal.num_draft_tokens, logits[:, :0]), wanted)
