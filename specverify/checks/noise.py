"""How far the target's logits move between execution shapes that are all legitimate: the measured numerical noise.

Note [Numerical noise]: the same weights give slightly different logits when a token is computed alone, in a chunk of
drafts, in a batch, or in one pass. If an engine's logits stay within B of the scorer's, a greedy engine can only emit a
token whose logit is within 2B of the largest. B is measured on the pair itself; nothing else is tolerated.

2B is a theorem and coarse: B is the largest movement of any logit. What decides a flip is how the difference of two logits
moves, and its standard deviation s is far smaller. So a token further than 6s below the first choice is suspicious: not proof,
since tails are what they are, but two of them are (`greedy` holds their number against the normal tail).

Somebody else's engine has a dtype and kernels of its own. `noise_of_engine` asks it without speculation, at temperature 0: what
it says there, and the log-probabilities that it reports, show how far its logits are from the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.check import asked, spread
from specverify.records import SamplingParams
from specverify.scoring import score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from specverify.engines import Engine
    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.subject import Subject

__all__ = ["MOST_OF_ENGINE", "Noise", "measured_noise", "noise_of_engine"]

_TEXTS = 3
_TOKENS = 24
"""Last tokens of a text that are decoded again."""
_PROMPTS_OF_ENGINE, _TOKENS_OF_ENGINE = 16, 24
MOST_OF_ENGINE = 0.5
"""Logits beyond which an engine without speculation is not this target; no more than this is ever allowed for.

Two roundings of bfloat16 (2^-7 each) of a logit of 32, which few are.
"""


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


def measured_noise(
    target: LanguageModel, texts: Sequence[Sequence[int]], *, chunk: int, engine_noise: float = 0.0
) -> Noise:
    """Decode the last tokens of the longest `texts` one by one alone, one by one in a batch, and in chunks.

    Each is compared with one pass over its whole text, so positions are as far out as in the texts themselves. An engine that
    is seen to be further off than that (`engine_noise`) is allowed as much, and no less spread.
    """
    here = _noise_here(target, texts, chunk)
    if engine_noise <= here.largest:
        return here
    return replace(here, largest=engine_noise, margin_sd=max(here.margin_sd, engine_noise))


@torch.inference_mode()
def noise_of_engine(off: Engine, subject: Subject, plan: Plan) -> float:
    """How far an engine's logits lie from the target's without speculation, as far as texts and log-probabilities tell."""
    room = subject.target.max_length - _TOKENS_OF_ENGINE
    prompts = spread(tuple(one for one in subject.prompts if len(one.token_ids) <= room), _PROMPTS_OF_ENGINE)
    params = SamplingParams(temperature=0, max_new_tokens=_TOKENS_OF_ENGINE, eos_token_ids=subject.eos_token_ids)
    traces = list(off.decode(asked("noise", plan, prompts, params, speculation=False)))
    scored = score(traces, target=subject.target, workers=subject.workers)
    if not len(scored):
        return 0.0
    # a flip says that B is at least half of its gap; little is asked, so the largest of it is not the largest there is
    seen = [float(scored["gap"].max())]
    for trace in traces:
        if len(trace.logprobs) == len(trace.token_ids) > 0:
            ids, start = trace.request.prompt_ids + trace.token_ids, len(trace.request.prompt_ids)
            rows = subject.target.logits([ids])[0, start - 1 : -1].double().log_softmax(-1).cpu()
            exact = rows.gather(1, torch.tensor(trace.token_ids)[:, None])[:, 0].numpy()
            moved = np.abs(np.array(trace.logprobs) - exact)
            finite = moved[np.isfinite(moved)]  # what isn't is for the check of log-probabilities to say
            seen.append(float(finite.max(initial=0.0)))
    return min(max(seen), MOST_OF_ENGINE)


@torch.inference_mode()
def _noise_here(target: LanguageModel, texts: Sequence[Sequence[int]], chunk: int) -> Noise:
    rows = [list(text) for text in sorted(texts, key=len, reverse=True)[:_TEXTS] if len(text) > 1]
    if not rows:
        return Noise(0.0, 0.0, 0)
    lasts = [min(_TOKENS, len(row) - 1) for row in rows]
    together = _decoded(target, rows, lasts, 1)
    differences, margins = [], []
    for row, last, batched in zip(rows, lasts, together, strict=True):
        expected = target.logits([row])[0, -last:].double()
        alone, chunked = (_decoded(target, [row], [last], width)[0] for width in (1, chunk))
        for actual in (alone, chunked, batched[:last]):
            differences.append((actual.double() - expected).abs().amax())
            margins.append(_margin(actual.double()) - _margin(expected))
    moved = torch.cat(margins)
    return Noise(float(torch.stack(differences).max()), float(moved.std()) if len(moved) > 1 else 0.0, len(moved))


def _margin(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    top = logits.topk(2, -1).values
    return top[:, 0] - top[:, 1]


def _decoded(
    target: LanguageModel, texts: list[list[int]], lasts: list[int], chunk: int
) -> Float[Tensor, "batch n vocab"]:
    """Logits after each of the last tokens of every text, appended `chunk` at a time to a cache of what comes before."""
    session = target.open([text[:-last] for text, last in zip(texts, lasts, strict=True)])
    longest = max(lasts)
    rows = [text[-last:] + [0] * (longest - last) for text, last in zip(texts, lasts, strict=True)]
    padded = torch.tensor(rows, device=target.device)
    lengths = torch.tensor(lasts, device=target.device)
    parts = []
    for start in range(0, longest, chunk):
        block = padded[:, start : start + chunk]
        parts.append(session.append(block, (lengths - start).clamp(0, block.shape[1])))
    return torch.cat(parts, 1)
