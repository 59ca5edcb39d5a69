"""Measurements of a trained pair: acceptance on the target's own samples, step times, and a bare loop against plain decoding.

This is the recipe's own yardstick, so it shares no line with the decoder that specverify puts under test. One sequence
at a time; times are CPU time of one thread, which another process on the same core does not lengthen as it does wall time.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from jaxtyping import Float
    from torch import Tensor
    from transformers import LlamaForCausalLM

__all__ = ["Acceptance", "CachedModel", "acceptance", "cpu_s", "decode", "load", "own_samples", "step_ms"]


@dataclass(frozen=True)
class Acceptance:
    """Mean of Σ min(p, q) over the tokens of the target's own samples; the error is clustered by prompt."""

    mean: float
    standard_error: float
    num_tokens: int


class CachedModel:
    """A model and what it has read; a rollback drops the last tokens. Knows both names of the cache argument."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        names = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in names else "past_key_values"
        self._cache = DynamicCache()
        self.length = 0

    def append(self, token_ids: Sequence[int]) -> Float[Tensor, "tokens vocab"]:
        """Logits after each of the new tokens."""
        self.length += len(token_ids)
        arguments = {self._argument: self._cache, "use_cache": True}
        return self.model(torch.tensor([list(token_ids)]), **arguments).logits[0]

    def rollback(self, length: int) -> None:
        """Forget all after the first `length` tokens."""
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length


def load(folder: Path) -> LlamaForCausalLM:
    """A shipped model, computing in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _law(logits: Float[Tensor, "*n vocab"], temperature: float) -> Float[Tensor, "*n vocab"]:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def _draw(law: Float[Tensor, " vocab"], generator: torch.Generator) -> int:
    return int(torch.multinomial(law, 1, generator=generator))


@torch.inference_mode()
def decode(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM | None,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int,
    num_tokens: int,
    temperature: float,
    generator: torch.Generator,
    eos_token_id: int | None = None,
) -> list[int]:
    """The new tokens. With no draft, or 0 speculative tokens, this is plain decoding through the same lines."""
    text, end = list(prompt), len(prompt) + num_tokens
    large, small = CachedModel(target), None if draft is None else CachedModel(draft)
    while len(text) < end and text[-1] != eos_token_id:
        drafted: list[int] = []
        laws: list[Tensor] = []
        for _ in range(num_speculative_tokens if small else 0):
            assert small is not None
            laws.append(_law(small.append([*text, *drafted][small.length :])[-1], temperature))
            drafted.append(_draw(laws[-1], generator))
        rows = _law(large.append([*text, *drafted][large.length :])[-len(drafted) - 1 :], temperature)  # [k + 1, V]
        kept = 0
        for law, row, token in zip(laws, rows, drafted, strict=False):
            if float(torch.rand((), generator=generator)) * float(law[token]) >= float(row[token]):
                break
            kept += 1
        last = rows[kept]
        if kept < len(drafted):
            residual = (last - laws[kept]).clamp(min=0)
            last = residual if float(residual.sum()) > 0 else last
        text += [*drafted[:kept], _draw(last, generator)]
        if eos_token_id in text[len(prompt) :]:
            text = text[: text.index(eos_token_id, len(prompt)) + 1]
        for model in (large, small):
            if model is not None:
                model.rollback(len(text) - 1)
    return text[len(prompt) : end]


def own_samples(
    target: LlamaForCausalLM,
    prompts: Iterable[tuple[str, Sequence[int]]],
    *,
    temperature: float,
    seed: int,
    eos_token_id: int,
    num_tokens: int = 120,
) -> list[tuple[str, list[int], list[int]]]:
    """One sample of the target for each (domain, prompt): the domain, the prompt, the new tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            domain,
            list(prompt),
            decode(
                target,
                None,
                prompt,
                num_speculative_tokens=0,
                num_tokens=num_tokens,
                temperature=temperature,
                generator=generator,
                eos_token_id=eos_token_id,
            ),
        )
        for domain, prompt in prompts
    ]


@torch.inference_mode()
def acceptance(
    target: LlamaForCausalLM,
    drafts: Mapping[str, LlamaForCausalLM],
    samples: Iterable[tuple[str, list[int], list[int]]],
    *,
    temperature: float,
) -> dict[tuple[str, str], Acceptance]:
    """By draft and domain, and over all domains under the name `all`."""
    seen: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for domain, prompt, new in samples:
        ids, rows = torch.tensor([prompt + new]), slice(len(prompt) - 1, -1)
        target_probs = _law(target(ids).logits[0, rows], temperature)
        for name, draft in drafts.items():
            draft_probs = _law(draft(ids).logits[0, rows], temperature)
            overlap = float(torch.minimum(target_probs, draft_probs).sum())
            seen[name, domain].append((overlap, len(new)))
            seen[name, "all"].append((overlap, len(new)))
    return {key: _ratio(values) for key, values in seen.items()}


def _ratio(values: list[tuple[float, int]]) -> Acceptance:
    """A ratio of sums over prompts, and its error by linearisation."""
    tokens = sum(count for _, count in values)
    mean = sum(total for total, _ in values) / tokens
    error = sum((total - mean * count) ** 2 for total, count in values) ** 0.5 / tokens
    return Acceptance(mean, error, tokens)


@torch.inference_mode()
def step_ms(
    models: Mapping[str, tuple[LlamaForCausalLM, int]], *, context: int = 64, rounds: int = 80
) -> dict[str, float]:
    """Median CPU milliseconds of appending n tokens after `context`, for each name: (model, n). The names take turns."""
    held = {name: (CachedModel(model), num_tokens) for name, (model, num_tokens) in models.items()}
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(4, 2048, (context + 16,), generator=generator).tolist()
    for model, _ in held.values():
        model.append(ids[:context])
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 5):
        for name, (model, num_tokens) in held.items():
            started = time.process_time()
            model.append(ids[context : context + num_tokens])
            if turn >= 5:
                times[name].append(1000 * (time.process_time() - started))
            model.rollback(context)
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_s(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM | None,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int,
    temperature: float,
    seed: int,
    num_tokens: int = 64,
) -> float:
    """CPU seconds to write exactly `num_tokens`, the prompt included; EOS is a token like any other here."""
    generator = torch.Generator().manual_seed(seed)
    started = time.process_time()
    decode(
        target,
        draft,
        prompt,
        num_speculative_tokens=num_speculative_tokens,
        num_tokens=num_tokens,
        temperature=temperature,
        generator=generator,
    )
    return time.process_time() - started
