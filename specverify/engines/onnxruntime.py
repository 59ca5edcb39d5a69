"""ONNX Runtime GenAI's generator, in process, on the CPU: with a draft model, or looking drafts up in what was said.

It is batch 1 with speculation, so samples are decoded one after the other. Steps are read from the statistics that it tells after each
token. A model ends texts at ids of its configuration, and needs one at least: a text that nothing shall end goes on by
appending that id, as a conversation would.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime_genai as genai

from specverify.engines import Capability
from specverify.engines.finish import finish_of
from specverify.engines.length import require_room
from specverify.engines.options import Options
from specverify.engines.seeds import seed32
from specverify.records import DecodeCounters, DecodeStep, DecodeTrace, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.engines import EngineSettings
    from specverify.records import DecodeRequest

__all__ = ["OnnxruntimeEngine", "opened"]

_OPTIONS = Options(
    engine="onnxruntime",
    defaults={"mode": "draft", "threads": "1", "ngram": "3"},
    choices={"mode": ("draft", "lookup")},
    counts=frozenset({"threads", "ngram"}),
)
_NOTHING = count(())
_MODELS = 4
"""Kept open, each with other ids that end a text."""


@dataclass
class OnnxruntimeEngine:
    """A model with speculation and one without, for each set of ids that end a text."""

    make: Callable[[bool, tuple[int, ...]], Any]
    """The model with speculation, or without, that these ids end."""
    speculative_options: dict[str, int]
    """Empty where there is nothing to speculate with."""
    takes_no_repeat: bool
    """A draft model and `no_repeat_ngram_size` refuse each other."""
    max_length: int = 256
    name: str = "onnxruntime"
    _counted: DecodeCounters = _NOTHING
    _models: dict[tuple[bool, tuple[int, ...]], Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """It knows no stop strings, and tells no log-probabilities."""
        counts = {Capability.COUNTERS, Capability.STEPS} if self.speculative_options else set()
        return frozenset({Capability.SEED, Capability.SPECULATION_SWITCH}) | counts

    @property
    def parameters(self) -> frozenset[str]:
        """It has neither min-p nor bans."""
        more = {"no_repeat_ngram_size"} if self.takes_no_repeat else set()
        return frozenset(
            {
                "temperature", "top_k", "top_p", "repetition_penalty", "min_new_tokens", "eos_token_ids",
                "stop_token_ids", *more,
            }
        )  # fmt: skip

    def counters(self) -> DecodeCounters:
        """As its statistics say: of each round of the generators so far."""
        return self._counted

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """One sample after the other. Raises `PromptError` past the last position."""
        for request in requests:
            require_room(request, self.max_length, self.name)
            for sample in range(request.num_samples):
                yield self._answer(request, sample)

    def _answer(self, request: DecodeRequest, sample: int) -> DecodeTrace:
        speculation = request.speculation and bool(self.speculative_options)
        ends = (*request.params.eos_token_ids, *request.params.stop_token_ids)
        generator = self._generator(request, sample, speculation=speculation)
        generator.append_tokens(np.array(request.prompt_ids, dtype=np.int32))
        token_ids: list[int] = []
        blocks: list[tuple[int, int, int]] = []  # drafted, accepted, emitted
        told = _Told(0, 0, 0, 0)
        while len(token_ids) < request.params.max_new_tokens and not (token_ids and token_ids[-1] in ends):
            if generator.is_done():
                if ends:
                    break
                generator.append_tokens(np.array(token_ids[-1:], dtype=np.int32))
            generator.generate_next_token()
            token_ids.append(int(generator.get_next_tokens()[0]))
            if speculation:
                before, told = told, _told(generator)
                if not before.buffered:  # a step: a round, or a look-up that found nothing
                    blocks.append((told.drafted - before.drafted, told.accepted - before.accepted, 0))
                drafted, accepted, emitted = blocks[-1]
                blocks[-1] = (drafted, accepted, emitted + 1)
        self._counted += DecodeCounters(
            num_drafts=told.rounds,
            num_draft_tokens=told.drafted,
            num_accepted_tokens=told.accepted,
            num_accepted_tokens_per_pos=(),
        )
        return DecodeTrace(
            request=request,
            sample=sample,
            token_ids=tuple(token_ids),
            finish=finish_of(token_ids, request.params),  # it tells that a text is done, and not why
            steps=tuple(DecodeStep(drafted, min(accepted, emitted), emitted) for drafted, accepted, emitted in blocks),
        )

    def _generator(self, request: DecodeRequest, sample: int, *, speculation: bool) -> Any:  # noqa: ANN401 - the package's
        params = request.params
        ends = tuple(sorted({*params.eos_token_ids, *params.stop_token_ids}))
        key = (speculation, ends)
        if key not in self._models:
            while len(self._models) >= _MODELS:
                del self._models[next(iter(self._models))]
            self._models[key] = self.make(*key)
        asked = genai.GeneratorParams(self._models[key])
        length = len(request.prompt_ids)
        asked.set_search_options(
            do_sample=not params.greedy,
            temperature=1.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            min_length=length + min(params.min_new_tokens, params.max_new_tokens) if params.min_new_tokens else 0,
            max_length=length + params.max_new_tokens,
            random_seed=seed32(request.seed, sample) >> 1,
        )
        if speculation:
            asked.set_speculative_options(**self.speculative_options)
        return genai.Generator(self._models[key], asked)


class _Told(NamedTuple):
    """Of a generator since it was made, and how many tokens it has decided and not yet handed out."""

    buffered: int
    rounds: int
    drafted: int
    accepted: int


def _told(generator: Any) -> _Told:  # noqa: ANN401 - the package's
    stats = generator.get_speculative_stats()
    names = ("tokens_buffered", "rounds", "draft_tokens_proposed", "draft_tokens_accepted")
    return _Told(*(int(stats[name]) for name in names))


@contextlib.contextmanager
def opened(settings: EngineSettings) -> Iterator[OnnxruntimeEngine]:
    """`EngineFactory`: folders with a `genai_config.json`, or in the Hugging Face layout, exported in float32 for the run.

    The option `mode` is `draft` or `lookup`.
    """
    options = _OPTIONS.read(settings.options)
    lookup = options["mode"] == "lookup"
    speculative: dict[str, int] = {}
    if settings.num_speculative_tokens and (lookup or settings.draft is not None):
        speculative = {"max_draft_tokens": settings.num_speculative_tokens}
        speculative |= {"ngram_size": int(options["ngram"])} if lookup else {}
    with tempfile.TemporaryDirectory(prefix="specverify-onnxruntime-") as name:
        scratch = Path(name)
        decoders = {"decoder": _exported(settings.target, scratch / "target")}
        if speculative and not lookup and settings.draft is not None:
            decoders["draft"] = _exported(settings.draft, scratch / "draft")
        folders = {True: scratch / "on", False: scratch / "off"}
        _write_config(folders[True], decoders, int(options["threads"]))
        _write_config(folders[False], {"decoder": decoders["decoder"]}, int(options["threads"]))

        def model(speculate: bool, ends: tuple[int, ...]) -> Any:  # noqa: ANN401, FBT001 - the package's own; which of the two
            config = genai.Config(str(folders[speculate]))
            if ends:
                config.overlay(json.dumps({"model": {"eos_token_id": list(ends)}}))
            return genai.Model(config)

        yield OnnxruntimeEngine(
            make=model,
            speculative_options=speculative,
            takes_no_repeat="draft" not in decoders,
            max_length=settings.max_length,
            name=f"onnxruntime, {options['mode']}",
        )


def _exported(folder: Path, scratch: Path) -> Path:
    """The folder itself where it is one of onnxruntime-genai, or what its own builder makes of it."""
    if (folder / "genai_config.json").is_file():
        return folder.absolute()
    from onnxruntime_genai.models import builder  # noqa: PLC0415 - heavy, and only where something is to be exported

    where = ("", str(folder), str(scratch), "fp32", "cpu", str(scratch / "cache"))
    builder.create_model(*where, **builder.parse_extra_options(*where, None))
    return scratch


def _write_config(folder: Path, decoders: dict[str, Path], threads: int) -> None:
    """A model of these decoders, which it finds under links: a path may not lead out of its folder."""
    folder.mkdir()
    told: dict[str, Any] = {}
    for name, its in decoders.items():
        (folder / name).symlink_to(its)
        config = json.loads((its / "genai_config.json").read_text(encoding="utf-8"))
        decoder = config["model"]["decoder"]
        told = told or config
        told["model"][name] = {
            **decoder,
            "filename": f"{name}/{decoder['filename']}",
            "session_options": {**decoder["session_options"], "intra_op_num_threads": threads},
        }
    (folder / "genai_config.json").write_text(json.dumps(told), encoding="utf-8")
