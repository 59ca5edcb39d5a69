"""A plugin of vLLM that mends, on the CPU, the two faults of docs/engines.md; vLLM finds it when this folder is on PYTHONPATH."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mend() -> None:
    """Replace the stand-in of `expand_kernel`, and spare `apply_top_k_only` the maximum of no rows."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    top_k_only = topk_topp_sampler.apply_top_k_only
    cpu_triton_utils._expand_kernel_impl = _expand
    topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k_only(logits, k) if len(logits) else logits


def _expand(output: Tensor, values: Tensor, ends: Tensor, replace_from: int, replace_to: int, *_launch: object) -> None:
    """Row i of `values` for each of its tokens, into `output` itself: vLLM's fills a copy as whole numbers, and drops it."""
    counts = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))
