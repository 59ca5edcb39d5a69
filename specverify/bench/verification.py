"""Verification steps on random logits: ours, the naive step that a user writes, and the peers that are installed.

All contenders get the same logits and drafts. The exponential limit is `torch.exp` over the same logits, the copy rate a
copy of them. A peer that works on one sequence is asked for each in turn; one that wants probabilities pays for them.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation import utils as generation

from specverify.bench.report import Comparison, comparisons_of
from specverify.choices.philox import Philox
from specverify.timing import in_turns
from specverify.verification import Proposal
from specverify.verification import chain as exact
from specverify.verification.fused import LogitsProposal, chain_rejection

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["BASELINE", "Workload", "contenders", "verification_suite"]

BASELINE = "naive torch"
"""Two softmaxes, the residual of every row, and `torch.multinomial`: what is written first."""

_EVERY_ROW = "fused, all accepted"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One verification step."""

    vocab_size: int
    num_speculative_tokens: int = 5
    batch: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    closeness: float = 0.9
    """Of the draft's logits to the target's: 1 accepts everything."""

    @property
    def id(self) -> str:
        """As it is listed."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"verification/V={self.vocab_size},g={self.num_speculative_tokens},B={self.batch},{dtype},{self.device}"

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.batch * (2 * self.num_speculative_tokens + 1)

    @property
    def num_bytes(self) -> int:
        """Of all logits."""
        return self.num_rows * self.vocab_size * self.dtype.itemsize

    def make(self) -> tuple[LogitsProposal, Float[Tensor, "batch k_plus_1 vocab"]]:
        """Random logits, and drafts drawn from the draft's own law."""
        generator = torch.Generator(self.device).manual_seed(17)
        shape = (self.batch, self.num_speculative_tokens + 1, self.vocab_size)
        target = 3 * torch.randn(shape, generator=generator, device=self.device)
        noise = 3 * torch.randn(shape, generator=generator, device=self.device)
        draft = (self.closeness * target + (1 - self.closeness) * noise)[:, :-1].to(self.dtype)
        laws = draft.float().softmax(-1).flatten(0, 1)
        ids = laws.multinomial(1, generator=generator).view(self.batch, self.num_speculative_tokens)
        counts = torch.full((self.batch,), self.num_speculative_tokens, device=self.device)
        return LogitsProposal(ids, counts, draft), target.to(self.dtype)


def contenders(work: Workload) -> tuple[dict[str, Callable[[], object]], tuple[str, ...]]:
    """What can be timed here, by name, and what can't and why."""
    proposal, target = work.make()
    draft, ids = proposal.draft_logits, proposal.token_ids
    same = LogitsProposal(target[:, :-1].argmax(-1), proposal.num_draft_tokens, target[:, :-1])
    kept = LogitsProposal(ids, proposal.num_draft_tokens, draft, draft.float().logsumexp(-1))
    rows, step = torch.arange(work.batch, device=work.device), iter(range(1 << 62))

    def choices() -> Philox:
        return Philox(rows, rows, rows, rows + next(step), work.num_speculative_tokens + 1)

    def of_float64() -> object:
        probs = Proposal(ids, proposal.num_draft_tokens, draft.double().softmax(-1))
        return exact.chain_rejection(probs, target.double().softmax(-1), choices())

    spare = torch.empty_like(target), torch.empty_like(draft)
    ready: dict[str, Callable[[], object]] = {
        BASELINE: lambda: naive(ids, draft, target),
        "fused": lambda: chain_rejection(proposal, target, choices()),
        "fused, kept sums": lambda: chain_rejection(kept, target, choices()),
        _EVERY_ROW: lambda: chain_rejection(same, target, choices()),
        "float64 rule": of_float64,
        "transformers": lambda: [_transformers(ids[row], draft[row], target[row]) for row in range(work.batch)],
        "exponential limit": lambda: (torch.exp(target, out=spare[0]), torch.exp(draft, out=spare[1])),
        "copy": lambda: (spare[0].copy_(target), spare[1].copy_(draft)),
    }
    left_out = []
    if work.device != "cuda":
        left_out += ["flashinfer, vLLM: need CUDA"]
    elif importlib.util.find_spec("flashinfer") is None:
        left_out += ["flashinfer: not installed"]
    else:
        ready["softmax + flashinfer"] = lambda: _flashinfer(ids, draft, target)
    return ready, tuple(left_out)


@torch.inference_mode()
def naive(
    ids: Int[Tensor, "batch k"], draft: Float[Tensor, "batch k vocab"], target: Float[Tensor, "batch k_plus_1 vocab"]
) -> tuple[Tensor, Tensor]:
    """Every law in full, a replacement for every place, and the one that is needed of them."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    at = ids[..., None]
    ratio = p[:, :-1].gather(-1, at)[..., 0] / q.gather(-1, at)[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    laws = torch.cat(((p[:, :-1] - q).clamp(min=0) + 1e-12, p[:, -1:]), 1)  # so that p = q leaves something
    tokens = laws.flatten(0, 1).multinomial(1).view(len(ids), -1)  # normalises by itself
    return accepted, tokens.gather(1, accepted[:, None])


def _transformers(
    ids: Int[Tensor, " k"], draft: Float[Tensor, "k vocab"], target: Float[Tensor, "k_plus_1 vocab"]
) -> object:
    theirs = generation._speculative_sampling  # noqa: SLF001 - the function itself is what is compared
    older = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(theirs).parameters else {}
    return theirs(ids[None], draft[None].float(), len(ids), target[None].float(), **older)


def _flashinfer(
    ids: Int[Tensor, "batch k"], draft: Float[Tensor, "batch k vocab"], target: Float[Tensor, "batch k_plus_1 vocab"]
) -> object:
    from flashinfer.sampling import chain_speculative_sampling  # noqa: PLC0415 - only where it is installed

    return chain_speculative_sampling(draft.float().softmax(-1), ids.int(), target.float().softmax(-1))


def verification_suite(
    work: Workload, *, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Every contender in turns; rates count the rows and bytes of all logits, read or not."""
    ready, left_out = contenders(work)
    taken = in_turns(ready, device=torch.device(work.device), repeats=repeats, clock=clock)
    num_bytes = dict.fromkeys(ready, float(work.num_bytes))
    found = comparisons_of(taken, of=work.id, baseline=BASELINE, units=work.num_rows, unit="rows", num_bytes=num_bytes)
    limit = {name: taken[name] for name in (_EVERY_ROW, "exponential limit")}
    return (
        *found,
        *comparisons_of(
            limit, of=work.id, baseline="exponential limit", units=work.num_rows, unit="rows", num_bytes=num_bytes
        ),
    ), left_out
