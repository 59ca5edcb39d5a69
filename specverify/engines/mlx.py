"""mlx-lm's own `stream_generate`, in process, on mlx's CPU backend too; speculation samples from the target and accepts a draft that equals it.

What is drafted is read from calls of the draft model, and what of it was accepted from `from_draft` of each answer.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    categorical_sampling,
    greedy_sampler,
    make_logits_processors,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specverify.engines import Capability
from specverify.engines.finish import ended
from specverify.engines.length import require_room
from specverify.engines.options import Options
from specverify.engines.seeds import seed32
from specverify.errors import RequestRefused
from specverify.records import DecodeStep, DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.engines import EngineSettings
    from specverify.records import DecodeRequest, SamplingParams

__all__ = ["MlxEngine", "opened"]

_OPTIONS = Options(engine="mlx", defaults={})
_PREFILL_STEP_SIZE = 512
"""Tokens of the prompt that the draft model reads in one call."""


@dataclass
class _Watched:
    """A draft model that counts its calls; all else is the model's own."""

    model: Any
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - arrays of mlx
        self.calls += 1
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.model, name)


@dataclass
class MlxEngine:
    """One request after the other: `stream_generate` is batch 1."""

    target: Any
    tokenizer: Any
    draft: Any = None
    num_speculative_tokens: int = 3
    max_length: int = 256
    name: str = "mlx"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """`stream_generate` knows no stop strings, and counts nothing."""
        return frozenset({Capability.SEED, Capability.STEPS, Capability.SPECULATION_SWITCH, Capability.LOGPROBS})

    @property
    def parameters(self) -> frozenset[str]:
        """Not its repetition penalty, which reads of the prompt the last token alone: another law."""
        return frozenset(
            {"temperature", "top_k", "top_p", "min_p", "banned_token_ids", "eos_token_ids", "stop_token_ids"}
        )

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Raises `PromptError` for what goes past the last position, which mlx-lm itself would not notice."""
        for request in requests:
            require_room(request, self.max_length, self.name)
            for sample in range(request.num_samples):
                yield self._answer(request, sample)

    def _answer(self, request: DecodeRequest, sample: int) -> DecodeTrace:
        params = request.params
        draft = _Watched(self.draft) if request.speculation and self.draft is not None else None
        speculation = {"num_draft_tokens": self.num_speculative_tokens} if draft is not None else {}
        mx.random.seed(seed32(request.seed, sample))
        answers = stream_generate(
            self.target,
            TokenizerWrapper(self.tokenizer, eos_token_ids=[*params.eos_token_ids, *params.stop_token_ids] or [-1]),
            list(request.prompt_ids),
            max_tokens=params.max_new_tokens,
            draft_model=draft,
            sampler=_sampler(params),
            logits_processors=_bans(params),
            prefill_step_size=_PREFILL_STEP_SIZE,
            **speculation,
        )
        read = math.ceil((len(request.prompt_ids) - 1) / _PREFILL_STEP_SIZE)
        token_ids: list[int] = []
        logprobs: list[float] = []
        blocks: list[tuple[int, list[bool]]] = []
        reason = None
        for answer in answers:
            reason = answer.finish_reason
            token_ids.append(int(answer.token))
            logprobs.append(float(answer.logprobs.reshape(-1)[answer.token]))
            if draft is not None:
                if draft.calls > read or not blocks:
                    blocks.append((draft.calls - read, []))
                    read = draft.calls
                blocks[-1][1].append(bool(answer.from_draft))
        return DecodeTrace(
            request=request,
            sample=sample,
            token_ids=tuple(token_ids),
            finish=ended(token_ids, params, reason),
            steps=tuple(DecodeStep(drafted, sum(accepted), len(accepted)) for drafted, accepted in blocks),
            logprobs=() if params.banned_token_ids else tuple(logprobs),
        )


def _sampler(params: SamplingParams) -> Callable[[Any], Any]:
    """mlx-lm's own filters and draw, in the order of everybody else: temperature, top-k, top-p, min-p.

    `make_sampler` has the temperature last and top-k after the others, which is another law.
    """
    if params.greedy:
        return greedy_sampler  # type: ignore[no-any-return]  # the package is untyped to mypy
    filters: list[Callable[[Any], Any]] = []
    if params.top_k:
        filters.append(lambda law: apply_top_k(law, params.top_k))
    if params.top_p < 1:
        filters.append(lambda law: apply_top_p(law, params.top_p))
    if params.min_p:
        filters.append(lambda law: apply_min_p(law, params.min_p, 1))

    def draw(logprobs: Any) -> Any:  # noqa: ANN401 - arrays of mlx
        law = _normalised(logprobs / params.temperature)
        for cut in filters:
            law = _normalised(cut(law))
        return categorical_sampling(law, 1.0)

    return draw


def _normalised(logits: Any) -> Any:  # noqa: ANN401 - arrays of mlx
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _bans(params: SamplingParams) -> list[Any] | None:
    if not params.banned_token_ids:
        return None
    if any(len(ids) > 1 for ids in params.banned_token_ids):
        msg = "mlx-lm can ban single ids, not sequences of them"
        raise RequestRefused(msg)
    return list(
        make_logits_processors(logit_bias=dict.fromkeys((ids[0] for ids in params.banned_token_ids), -math.inf))
    )


@contextlib.contextmanager
def opened(settings: EngineSettings) -> Iterator[MlxEngine]:
    """`EngineFactory`: the folders in the Hugging Face layout, as mlx-lm loads them."""
    _OPTIONS.read(settings.options)
    target, wrapper = load(str(settings.target))
    tokenizer = wrapper._tokenizer  # noqa: SLF001 - wrapped anew with the ends of each request
    tokenizer.eos_token = None  # else it ends every text, asked for or not
    yield MlxEngine(
        target=target,
        tokenizer=tokenizer,
        draft=load(str(settings.draft))[0] if settings.draft is not None else None,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_length=settings.max_length,
    )
