"""Whole decodes with a pair: the reference decoder against the target alone and transformers' assisted generation."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging as transformers_logging

from specverify.bench.report import Comparison, comparisons_of
from specverify.context import Row
from specverify.decoding import autoregressive, speculative
from specverify.drafting import DraftModel
from specverify.models.transformers import TransformersModel
from specverify.records import DecodeRequest, SamplingParams
from specverify.timing import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.decoding import Decoder
    from specverify.models.loading import Pair
    from specverify.subject import Subject

    Clock = Callable[[], float]

__all__ = ["assisted_suite", "batch_suite", "prompt_suite"]

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


def _recorded(decoder: Decoder) -> Decoder:
    """The same decoder, faster at batch 1; see Note [Recorded passes]."""
    target, drafter = decoder.target, decoder.drafter
    if isinstance(target, TransformersModel):
        target = target.recorded()
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, TransformersModel):
        drafter = replace(drafter, model=drafter.model.recorded())
    return replace(decoder, target=target, drafter=drafter)


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
    decoder = _recorded(decoder)
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
