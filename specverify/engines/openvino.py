"""OpenVINO GenAI's continuous batching, in process, on the CPU: with a draft model, or looking drafts up in the prompt.

One pipeline with speculation and one without; requests that are handed over together are one batch of `generate`, ids in, ids out.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai as genai
from openvino_tokenizers import convert_tokenizer
from transformers import AutoTokenizer

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.finish import ended
from specverify.engines.length import require_room
from specverify.engines.options import Options
from specverify.engines.seeds import seed32
from specverify.errors import PairError
from specverify.records import DecodeCounters, DecodeTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.engines import EngineSettings
    from specverify.records import DecodeRequest

__all__ = ["OpenvinoEngine", "opened"]

_OPTIONS = Options(
    engine="openvino",
    defaults={"mode": "draft", "prefix_cache": "no", "threads": "1", "ngram": "3"},
    choices={"mode": ("draft", "lookup"), "prefix_cache": ("yes", "no")},
    counts=frozenset({"threads", "ngram"}),
)
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Its defaults compute in bfloat16 and keep the cache in 8 bits: another law."""
_REASONS = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}


@dataclass
class OpenvinoEngine:
    """Two pipelines of the same target; one that raised keeps its requests for ever, so it is made anew."""

    make: Callable[[bool], Any]
    """The pipeline with speculation, or without."""
    speculates: bool
    num_speculative_tokens: int
    ngram: int = 0
    """Of a look-up; 0 with a draft model."""
    max_length: int = 256
    name: str = "openvino"
    _counted: list[int] = field(default_factory=lambda: [0, 0])
    """Drafted, accepted."""
    _pipelines: dict[bool, Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """It counts what a draft model drafts, and shows no steps; `generate` hands out no log-probabilities of single tokens."""
        counts = {Capability.COUNTERS} if self.speculates and not self.ngram else set()
        return frozenset({Capability.SEED, Capability.SPECULATION_SWITCH, Capability.STOP_STRINGS}) | counts

    @property
    def parameters(self) -> frozenset[str]:
        """Not bans, for which it has no name, nor `no_repeat_ngram_size`, which is for its beam search alone."""
        return ALL_PARAMETERS - {"banned_token_ids", "no_repeat_ngram_size"}

    def counters(self) -> DecodeCounters:
        """It doesn't tell how many drafts there were."""
        drafted, accepted = self._counted
        return DecodeCounters(
            num_drafts=None, num_draft_tokens=drafted, num_accepted_tokens=accepted, num_accepted_tokens_per_pos=()
        )

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Each sample is a request of its own with its own seed. Raises `PromptError` past the last position."""
        for request in requests:
            require_room(request, self.max_length, self.name)
        for speculation in (True, False):
            asked = [
                (request, sample)
                for request in requests
                if request.speculation is speculation
                for sample in range(request.num_samples)
            ]
            if asked:
                yield from self._answers(asked, speculation=speculation and self.speculates)

    def _answers(self, asked: Sequence[tuple[DecodeRequest, int]], *, speculation: bool) -> Iterator[DecodeTrace]:
        prompts = [openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64)) for request, _ in asked]
        configs = [self._config(request, sample, speculation=speculation) for request, sample in asked]
        if speculation not in self._pipelines:
            self._pipelines[speculation] = self.make(speculation)
        try:
            answers = self._pipelines[speculation].generate(prompts, configs)
        except Exception:
            del self._pipelines[speculation]
            raise
        told = answers[0].extended_perf_metrics  # of the whole call, the same in each answer
        if told is not None and Capability.COUNTERS in self.capabilities and speculation:
            self._counted[0] += told.get_num_draft_tokens()
            self._counted[1] += told.get_num_accepted_tokens()
        for (request, sample), answer in zip(asked, answers, strict=True):
            (token_ids,) = answer.m_generation_ids
            (reason,) = answer.finish_reasons
            finish = ended(token_ids, request.params, _REASONS.get(reason))
            yield DecodeTrace(request=request, sample=sample, token_ids=tuple(token_ids), finish=finish)

    def _config(self, request: DecodeRequest, sample: int, *, speculation: bool) -> Any:  # noqa: ANN401 - the package's
        params, config = request.params, genai.GenerationConfig()
        config.apply_chat_template = False
        config.max_new_tokens = params.max_new_tokens
        config.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)  # it raises where it is more
        config.do_sample = not params.greedy
        config.rng_seed = seed32(request.seed, sample)
        if not params.greedy:
            config.temperature, config.top_p, config.min_p = params.temperature, params.top_p, params.min_p
            if params.top_k:
                config.top_k = params.top_k
        config.repetition_penalty = params.repetition_penalty
        ends = [*params.eos_token_ids, *params.stop_token_ids]
        config.ignore_eos = not ends  # with it, stop ids are passed over as well
        if ends:
            config.eos_token_id = ends[0]  # else that of the model's folder ends the text
        config.stop_token_ids = set(ends)
        config.stop_strings = set(params.stop_strings)
        config.include_stop_str_in_output = True
        if speculation:
            config.num_assistant_tokens = self.num_speculative_tokens
            config.max_ngram_size = self.ngram
        return config


@contextlib.contextmanager
def opened(settings: EngineSettings) -> Iterator[OpenvinoEngine]:
    """`EngineFactory`: folders in OpenVINO's own format, or the GGUF beside each folder, converted for the run.

    The option `mode` is `draft` or `lookup`. Raises `PairError` where there is neither.
    """
    options = _OPTIONS.read(settings.options)
    properties = {**_EXACT, "INFERENCE_NUM_THREADS": int(options["threads"])}
    lookup = options["mode"] == "lookup"
    with tempfile.TemporaryDirectory(prefix="specverify-openvino-") as scratch:
        target = _converted(settings.target, Path(scratch) / "target")
        speculation: dict[str, Any] = {}
        if lookup and settings.num_speculative_tokens:
            speculation = {"prompt_lookup": True}
        elif settings.draft is not None and not lookup:
            draft = _converted(settings.draft, Path(scratch) / "draft")
            speculation = {"draft_model": genai.draft_model(str(draft), "CPU", **properties)}

        def pipeline(speculate: bool) -> Any:  # noqa: ANN401, FBT001 - the package's own; which of the two
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1  # GB
            scheduler.max_num_seqs = settings.max_batch_size
            scheduler.enable_prefix_caching = options["prefix_cache"] == "yes"
            more = speculation if speculate else {}
            return genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", {**properties, **more})

        yield OpenvinoEngine(
            make=pipeline,
            speculates=bool(speculation),
            num_speculative_tokens=settings.num_speculative_tokens,
            ngram=int(options["ngram"]) if lookup else 0,
            max_length=settings.max_length,
            name=f"openvino, {options['mode']}",
        )


def _converted(folder: Path, scratch: Path) -> Path:
    """A folder in OpenVINO's format: the one given, or what OpenVINO makes of the GGUF, with the tokenizer of the folder."""
    if (folder / "openvino_model.xml").is_file():
        return folder
    gguf = folder.with_name(f"{folder.name}.gguf")
    if not gguf.is_file():
        msg = f"{folder} holds no openvino_model.xml, and {gguf} isn't there; convert the model with OpenVINO's own tools first"
        raise PairError(msg)
    scratch.mkdir()
    copy = scratch / "model.gguf"
    shutil.copyfile(gguf, copy)
    genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()
    both = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    for model, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        for old in scratch.glob(f"openvino_{name}.*"):
            old.unlink()
        openvino.save_model(model, scratch / f"openvino_{name}.xml")
    return scratch
