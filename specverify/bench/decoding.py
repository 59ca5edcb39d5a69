"""Whole decodes with a pair: the reference decoder against the target alone and transformers' assisted generation."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from specverify.bench.overhead import overhead, recorded
from specverify.bench.report import Comparison, comparisons_of
from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.transformers import TransformersModel
from specverify.records import DecodeRequest, SamplingParams
from specverify.timing import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.models.loading import Pair
    from specverify.subject import Subject

    Clock = Callable[[], float]

__all__ = ["assisted_suite", "batch_suite", "certification_suite", "overhead_of", "prompt_suite"]

_TOKENS = 32
ALONE, SPECULATIVE, ASSISTED = "target alone", "speculative", "assisted generation"


def _request(prompt: Sequence[int], *, temperature: float, seed: int, num_tokens: int = _TOKENS) -> DecodeRequest:
    params = SamplingParams(temperature=temperature, max_new_tokens=num_tokens)  # no EOS: all decode as many tokens
    return DecodeRequest(id="bench", prompt_ids=tuple(prompt), params=params, seed=seed)


def _both(decoder: Decoder, rows: Sequence[Row]) -> dict[str, Callable[[], object]]:
    return {
        ALONE: lambda: list(autoregressive(decoder, rows)),
        SPECULATIVE: lambda: list(speculative(decoder, rows)),
    }


def batch_suite(
    decoder: Decoder, prompt: Sequence[int], *, batch: int, repeats: int, clock: Clock = time.perf_counter
) -> tuple[Comparison, ...]:
    """Samples of one prompt, as certification draws them: four tokens, so that most rows are in use all the time."""
    request = _request(prompt, temperature=1.0, seed=17, num_tokens=4)
    taken = in_turns(
        _both(decoder, [Row(request, sample) for sample in range(batch)]),
        device=decoder.target.device,
        repeats=repeats,
        clock=clock,
    )
    return comparisons_of(taken, of=f"decoding/batch={batch},4 tokens", baseline=ALONE, units=batch, unit="sequences")


def certification_suite(*, repeats: int, clock: Clock = time.perf_counter) -> tuple[Comparison, ...]:
    """Samples of four tokens by random models of 64 ids, in the batch that suits one core; the draft is one layer of 32."""
    draft = _random_model(hidden_size=32, layers=1)
    found: list[Comparison] = []
    for hidden_size, layers in ((64, 2), (128, 4)):
        target = _random_model(hidden_size=hidden_size, layers=layers)
        decoder = Decoder(target=target, drafter=DraftModel(draft, target.vocab_size))
        suite = batch_suite(decoder, range(1, 9), batch=512, repeats=repeats, clock=clock)
        name = f"certification/{layers} layers of {hidden_size}, 512 rows, 4 tokens"
        found += [replace(each, id=name) for each in suite]
    return tuple(found)


def _random_model(*, hidden_size: int, layers: int) -> TransformersModel:
    """Weights so large that the draft's tokens are often rejected."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(hidden_size)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 32,
            initializer_range=0.1,
        )
        return TransformersModel(LlamaForCausalLM(config), f"{layers} random layers of {hidden_size}")


def prompt_suite(
    decoder: Decoder, prompt: Sequence[int], *, length: int, repeats: int, clock: Clock = time.perf_counter
) -> tuple[Comparison, ...]:
    """One sequence after a prompt of this length, made by repeating one."""
    long = (tuple(prompt) * (length // len(prompt) + 1))[:length]
    row = Row(_request(long, temperature=1.0, seed=17), 0)
    taken = in_turns(_both(decoder, [row]), device=decoder.target.device, repeats=repeats, clock=clock)
    return comparisons_of(taken, of=f"decoding/prompt={length}", baseline=ALONE, units=_TOKENS, unit="tokens")


def assisted_suite(
    subject: Subject, *, temperature: float, repeats: int, clock: Clock = time.perf_counter
) -> tuple[Comparison, ...]:
    """One sequence at a time, each contender on the same prompts in each turn, by both loops with the same numbers.

    A turn is all prompts, so that luck in one of them weighs little: sampled texts are not the same in both.
    """
    decoder, pair = subject.decoder, subject.pair
    if decoder is None or pair is None or pair.draft is None:
        return ()
    decoder = recorded(decoder)
    prompts = [prompt.token_ids for prompt in subject.prompts[:6]]
    turns = iter(range(1 << 62))

    def ours() -> None:
        turn = next(turns)
        for prompt in prompts:
            list(speculative(decoder, [Row(_request(prompt, temperature=temperature, seed=turn), 0)]))

    def theirs() -> None:
        torch.manual_seed(next(turns))
        for prompt in prompts:
            _assisted(pair, prompt, temperature, decoder.num_speculative_tokens)

    with _silence():
        taken = in_turns(
            {ASSISTED: theirs, SPECULATIVE: ours}, device=decoder.target.device, repeats=repeats, clock=clock
        )
    name = f"decoding/batch=1,temperature={temperature:g}"
    return comparisons_of(taken, of=name, baseline=ASSISTED, units=_TOKENS * len(prompts), unit="tokens")


def overhead_of(subject: Subject, *, repeats: int, clock: Clock = time.perf_counter) -> dict[str, float | int | str]:
    """Of the decodes of `assisted_suite` at temperature 1."""
    if subject.decoder is None:
        return {}
    requests = [_request(prompt.token_ids, temperature=1.0, seed=17) for prompt in subject.prompts[:6]]
    found = overhead(recorded(subject.decoder), requests, repeats=repeats, clock=clock)
    return {f"decoding/batch=1/{name}": value for name, value in found.items()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What transformers says about arguments that its own loop passes on."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.inference_mode()
def _assisted(pair: Pair, prompt: Sequence[int], temperature: float, num_speculative_tokens: int) -> None:
    """Transformers' own loop, told to draft as many tokens, always, and to stop nowhere."""
    assert pair.draft is not None
    target, draft = pair.target.model, pair.draft.model
    asked = {
        "num_assistant_tokens": num_speculative_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    config = draft.module.generation_config
    before = {name: getattr(config, name, None) for name in asked}
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    try:
        config.update(**asked)
        target.module.generate(
            torch.tensor([prompt], device=target.device),
            assistant_model=draft.module,
            max_new_tokens=_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
        )
    finally:
        config.update(**before)
