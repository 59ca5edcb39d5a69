"""transformers' own assisted generation and prompt lookup, in process, through `generate` alone.

Steps are read from public hooks: a streamer is told what each step emits, and a forward hook of the target sees the
drafts that it verifies. Assisted generation is batch 1, so samples are decoded one after the other.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer, TextStreamer

from specverify.engines import ALL_PARAMETERS, Capability, Told
from specverify.engines.finish import finish_of
from specverify.engines.length import require_room
from specverify.engines.options import Options
from specverify.errors import PlanError, SubjectError
from specverify.models.loading import DTYPES, load_model
from specverify.records import DecodeStep, DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specverify.engines import EngineSettings
    from specverify.records import DecodeRequest, FinishReason, SamplingParams

__all__ = ["TransformersEngine", "assisted", "lookup"]

_OPTIONS = Options(
    engine="transformers",
    defaults={
        "dtype": "float32", "device": "cpu", "early_exit": "", "different_tokenizers": "no", "confidence": "0",
        "schedule": "constant",
    },
    choices={
        "dtype": tuple(DTYPES), "different_tokenizers": ("yes", "no"),
        "schedule": ("constant", "heuristic", "heuristic_transient"),
    },
    counts=frozenset({"early_exit"}),
    numbers=frozenset({"confidence"}),
)  # fmt: skip
"""`schedule` and `confidence` are `num_assistant_tokens_schedule` and `assistant_confidence_threshold` of `generate`."""


_NO_EOS = [-1]
"""No id: `None` would be filled in from the model's folder."""


@dataclass
class _Steps(BaseStreamer):
    """What each step drafted and emitted, as `generate` shows it to the public."""

    prompt_length: int
    steps: list[DecodeStep] = field(default_factory=list)
    _read: tuple[int, ...] = ()
    """Ids of the target's last forward pass."""
    _begun: bool = False

    def hook(self, module: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass of the target."""
        del module
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._read = tuple(ids[0].tolist()) if ids is not None else ()

    def put(self, value: Tensor) -> None:
        """The prompt first, then what each step emits."""
        emitted = tuple(value.flatten().tolist())
        if not self._begun:
            self._begun = True
            return
        drafts = self._read[self.prompt_length if not self.steps else 1 :]
        pairs = enumerate(zip(drafts, emitted, strict=False))
        accepted = next((place for place, (draft, said) in pairs if draft != said), min(len(drafts), len(emitted)))
        self.steps.append(DecodeStep(len(drafts), accepted, len(emitted), drafts))

    def end(self) -> None:
        """Nothing is left to say."""


class _Pieces(TextStreamer):
    """What a user of transformers' own streamer is shown, and the ids that it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_prompt: bool) -> None:
        super().__init__(cast("Any", tokenizer), skip_prompt=skip_prompt)
        self.told: list[str] = []
        self.token_ids: list[int] = []

    def put(self, value: Tensor) -> None:
        """The prompt first, then what each step emits."""
        if not self.next_tokens_are_prompt:
            self.token_ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002 - transformers' signature
        """A piece, in place of standard output."""
        del stream_end
        if text:
            self.told.append(text)


@dataclass
class TransformersEngine:
    """`generate` with an assistant, with prompt lookup, or with the target's own first layers as the draft."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    assistant: PreTrainedModel | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    """Given where the two differ; drafts then go through text."""
    drafting: dict[str, Any] = field(default_factory=dict)
    """Arguments of `generate` that switch speculation on, but for the assistant."""
    max_length: int = 256
    name: str = "transformers"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """It tells no counters of its own, and its scores are processed logits, so neither is offered."""
        return frozenset(Capability) - {Capability.COUNTERS, Capability.LOGPROBS, Capability.SCHEMA}

    @property
    def parameters(self) -> frozenset[str]:
        """`generate` takes all of them."""
        return ALL_PARAMETERS

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """One request after the other; without speculation all samples of a request in one batch."""
        for request in requests:
            require_room(request, self.max_length, self.name)
            if request.speculation and self._speculates:
                for sample in range(request.num_samples):
                    yield self._speculative(request, sample)
            else:
                yield from self._alone(request)

    @property
    def _speculates(self) -> bool:
        return self.assistant is not None or bool(self.drafting)

    @property
    def _switches(self) -> dict[str, Any]:
        """Arguments of `generate` for speculation."""
        more = dict(self.drafting)
        if self.assistant is not None:
            more["assistant_model"] = self.assistant
        if self.assistant_tokenizer is not None:
            more |= {"tokenizer": self.tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        return more

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """The first sample through transformers' own `TextStreamer`, or decoded whole."""
        if schema:
            msg = f"{self.name} takes no JSON schema"
            raise PlanError(msg)
        pieces = _Pieces(self.tokenizer, skip_prompt=True)
        more = {"streamer": pieces} if stream else {}
        switches = self._switches if request.speculation else {}
        (token_ids,) = self._generate(request, 0, 1, **switches, **more)
        return Told(
            text=str(self.tokenizer.decode(list(token_ids))),
            token_ids=tuple(pieces.token_ids) if stream else token_ids,
            finish=self._finish(token_ids, request.params),
            pieces=tuple(pieces.told),
        )

    def _speculative(self, request: DecodeRequest, sample: int) -> DecodeTrace:
        seen = _Steps(len(request.prompt_ids))
        handle = self.target.register_forward_pre_hook(seen.hook, with_kwargs=True)
        try:
            (token_ids,) = self._generate(request, sample, 1, streamer=seen, **self._switches)
        finally:
            handle.remove()
        return DecodeTrace(
            request=request,
            sample=sample,
            token_ids=token_ids,
            finish=self._finish(token_ids, request.params),
            steps=tuple(seen.steps) if sum(step.num_emitted_tokens for step in seen.steps) == len(token_ids) else (),
        )

    def _alone(self, request: DecodeRequest) -> Iterator[DecodeTrace]:
        for sample, token_ids in enumerate(self._generate(request, 0, request.num_samples)):
            yield DecodeTrace(
                request=request, sample=sample, token_ids=token_ids, finish=self._finish(token_ids, request.params)
            )

    def _finish(self, token_ids: Sequence[int], params: SamplingParams) -> FinishReason:
        text = str(self.tokenizer.decode(list(token_ids))) if params.stop_strings else ""
        return finish_of(token_ids, params, text=text)

    @torch.inference_mode()
    def _generate(self, request: DecodeRequest, sample: int, num_samples: int, **more: Any) -> list[tuple[int, ...]]:  # noqa: ANN401 - arguments of `generate`
        prompt = torch.tensor([request.prompt_ids], device=self.target.device)
        if request.params.stop_strings:
            more.setdefault("tokenizer", self.tokenizer)
        config = _config(request.params, num_samples)
        with _quiet(), torch.random.fork_rng(devices=[]):
            if request.seeded:
                torch.manual_seed((request.seed * 1_000_003 + sample) % 2**63)
            else:
                torch.seed()
            ids = cast("Any", self.target).generate(
                inputs=prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **more
            )
        return [_without_padding(row[prompt.shape[1] :].tolist(), request.params) for row in ids]


def _config(params: SamplingParams, num_samples: int) -> GenerationConfig:
    """Everything that is asked, spelled out: what a model folder sets by default must not leak in."""
    ends = [*params.eos_token_ids, *params.stop_token_ids]
    sampled = {} if params.greedy else {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    return GenerationConfig(
        do_sample=not params.greedy,
        num_return_sequences=1 if params.greedy else num_samples,
        **sampled,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens or None,
        bad_words_ids=[list(ids) for ids in params.banned_token_ids] or None,
        max_new_tokens=params.max_new_tokens,
        eos_token_id=ends or _NO_EOS,
        stop_strings=list(params.stop_strings) or None,
        pad_token_id=0,
    )


def _without_padding(token_ids: list[int], params: SamplingParams) -> tuple[int, ...]:
    """In a batch a row that ended is padded: it ends with its first end, where one may fall."""
    ends = {*params.eos_token_ids, *params.stop_token_ids}
    for place, token in enumerate(token_ids):
        if token in ends and place >= params.min_new_tokens:
            return tuple(token_ids[: place + 1])
    return tuple(token_ids)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Neither warnings nor log lines of `generate`; what it does wrong shows in the texts."""
    from transformers.utils import logging  # noqa: PLC0415 - read where the level is changed

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def assisted(settings: EngineSettings) -> Iterator[TransformersEngine]:
    """`generate(assistant_model=…)`, or with the option `early_exit=N` the target's first N layers as the assistant."""
    options = _OPTIONS.read(settings.options)
    engine = _loaded(settings, options)
    if options["early_exit"]:
        engine.drafting = {"assistant_early_exit": int(options["early_exit"])}
        engine.name = f"transformers, early exit at {options['early_exit']}"
        _set_drafts(engine.target, settings, options)
    elif settings.draft is not None:
        loaded = load_model(settings.draft, device=options["device"], dtype=options["dtype"])
        engine.assistant = loaded.model.module
        _set_drafts(engine.assistant, settings, options)
        if options["different_tokenizers"] == "yes":
            engine.assistant_tokenizer = loaded.tokenizer
            engine.name = "transformers, different tokenizers"
    yield engine


@contextlib.contextmanager
def lookup(settings: EngineSettings) -> Iterator[TransformersEngine]:
    """`generate(prompt_lookup_num_tokens=…)`; the draft folder, where one is given, is not read."""
    engine = _loaded(settings, _OPTIONS.read(settings.options))
    engine.name = "transformers, prompt lookup"
    if settings.num_speculative_tokens:
        engine.drafting = {"prompt_lookup_num_tokens": settings.num_speculative_tokens}
    yield engine


def _loaded(settings: EngineSettings, options: dict[str, str]) -> TransformersEngine:
    loaded = load_model(settings.target, device=options["device"], dtype=options["dtype"])
    return TransformersEngine(
        target=loaded.model.module,
        tokenizer=loaded.tokenizer,
        max_length=min(settings.max_length, loaded.model.max_length),
    )


def _set_drafts(assistant: PreTrainedModel, settings: EngineSettings, options: dict[str, str]) -> None:
    """As many drafts as were asked for, each step, unless the options ask for transformers' own adaptation."""
    config = assistant.generation_config
    if config is None:
        msg = "the assistant has no generation configuration, so the number of its drafts can't be set"
        raise SubjectError(msg)
    config.num_assistant_tokens = settings.num_speculative_tokens
    config.num_assistant_tokens_schedule = options["schedule"]
    config.assistant_confidence_threshold = float(options["confidence"])
