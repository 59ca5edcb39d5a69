"""Logits of target and draft, their float64 laws, and what counts as the same decision."""

from __future__ import annotations

from dataclasses import replace

import torch

from specverify.records import SamplingParams
from specverify.sampling import probabilities
from specverify.verification import Proposal, Verification
from specverify.verification.fused import LogitsProposal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
)
ALLOWED = 2.0**-13
"""Of a uniform, over the mass of the residual: rounding of two laws in float32, each below 2^-15."""


def laws(logits, params, vocab_size):
    """As the float64 rule wants them."""
    logits = logits[..., :vocab_size]
    batch, n = logits.shape[:2]
    return probabilities(
        logits,
        [params] * batch,
        token_ids=torch.zeros(batch, 1, dtype=torch.int64),
        prefix_lengths=torch.ones(batch, n, dtype=torch.int64),
        prompt_lengths=torch.ones(batch, dtype=torch.int64),
    )


def case(
    seed, *, vocab_size, batch=4, drafts=3, padding=0, closeness=0.7, scale=3.0, dtype=torch.float32, params=PARAMS[0]
):
    """Logits of target and draft, drafts drawn from the draft's law, and both in float64."""
    generator = torch.Generator().manual_seed(seed)
    target = scale * torch.randn(batch, drafts + 1, vocab_size + padding, generator=generator)
    noise = scale * torch.randn(batch, drafts, vocab_size + padding, generator=generator)
    draft = (closeness * target[:, :drafts] + (1 - closeness) * noise).to(dtype)
    target = target.to(dtype)
    target[..., vocab_size:] = 50.0  # the padding would be emitted at once
    draft[..., vocab_size:] = 50.0
    counts = torch.randint(0, drafts + 1, (batch,), generator=generator)
    counts[0] = drafts
    draft_probs, target_probs = laws(draft, params, vocab_size), laws(target, params, vocab_size)
    ids = draft_probs.flatten(0, 1).multinomial(1, generator=generator).view(batch, drafts)
    probs = Proposal(ids, counts, draft_probs)
    return (
        LogitsProposal(ids, counts, draft),
        target,
        replace(probs, draft_probs=draft_probs * probs.drafted[..., None]),
        target_probs,
    )


def require_same(found: Verification, wanted: Verification, proposal: Proposal, target_probs, uniform):
    """The same count; and the same token, or a uniform within rounding of every border between the two."""
    assert found.num_accepted_tokens.tolist() == wanted.num_accepted_tokens.tolist()
    draft_probs = torch.nn.functional.pad(proposal.draft_probs, (0, 0, 0, 1))
    for row, place in enumerate(wanted.num_accepted_tokens.tolist()):
        ours, theirs = int(found.next_token_ids[row]), int(wanted.next_token_ids[row])
        if ours == theirs:
            continue
        residual = (target_probs[row, place] - draft_probs[row, place]).clamp(min=0)
        cdf = residual.cumsum(-1) / residual.sum()
        u, low, high = float(uniform(row, place)), min(ours, theirs), max(ours, theirs)
        allowed = ALLOWED / float(residual.sum())
        assert float(cdf[low]) >= u - allowed, "the uniform is beyond the lower id"
        assert float(cdf[high - 1]) <= u + allowed, "the uniform is short of the higher id"


def tied(logits, params, vocab_size):
    """Whether a cut-off falls between equal scores, or within float32 of where top-p ends."""
    scores = logits[..., :vocab_size].float()
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return False
    kept = laws(logits, params, vocab_size) > 0
    least = scores.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    most_cut = scores.masked_fill(kept, -torch.inf).amax(-1, keepdim=True)
    above = laws(logits, replace(params, top_p=1.0, min_p=0.0), vocab_size)
    borders = torch.stack([(above * (scores > each)).sum(-1) for each in (least, most_cut)])
    near = ((borders - params.top_p).abs() < 1e-5).any() & (params.top_p < 1)
    if params.min_p:
        full = laws(logits, replace(params, top_k=0, top_p=1.0, min_p=0.0), vocab_size)
        near = near | (((full / full.amax(-1, keepdim=True)) / params.min_p).log().abs() < 1e-5).any()
    return bool((least == most_cut).any() | near)
