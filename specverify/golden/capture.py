"""All layers of a pair, captured: freely to record a golden, or along a golden's ids to be held against it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from specverify.golden.behaviour import behaviour_of
from specverify.golden.decoder import Asked, decoded, engine_of
from specverify.golden.numerics import laws_at, noise_facts, positions_of
from specverify.golden.records import DecodedPrompt, DecodedSample, Golden, NoiseFacts, PromptGolden, Recording
from specverify.golden.sampling import generation_facts, processed_laws
from specverify.golden.tokenizer import encoded_prompt, rendered, tokenizer_facts
from specverify.golden.weights import weights_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Shaped
    from numpy import ndarray

    from specverify.engines import Engine
    from specverify.golden.numerics import Laws
    from specverify.golden.records import Encoding, GenerationFacts, Provenance, TokenizerFacts, WeightsFacts
    from specverify.models import LanguageModel
    from specverify.models.loading import LoadedModel, Pair
    from specverify.records import Prompt
    from specverify.watch import Watch

__all__ = ["again", "capture"]

_NOTHING = DecodedPrompt(target_only=(), greedy=DecodedSample(token_ids=(), drafted=(), accepted=()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What goes into a decode, and depends on no recording."""

    tokenizer: TokenizerFacts
    weights: WeightsFacts
    generation: GenerationFacts
    draft: WeightsFacts | None
    arrays: Mapping[str, Shaped[ndarray, ...]]


def capture(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    name: str,
    provenance: Provenance,
    seed: int,
    num_speculative_tokens: int,
    max_new_tokens: int,
    engine: Engine | None = None,
    watch: Watch | None = None,
) -> Recording:
    """Every layer of `pair` on `prompts`, each with what the pair itself makes of the layer above."""
    inputs = _inputs(pair)
    _advance(watch)
    encodings = {prompt.id: encoded_prompt(pair.target, prompt) for prompt in prompts}
    asked = _asked(
        {name: each.ids for name, each in encodings.items()}, prompts, inputs.generation, seed, max_new_tokens
    )
    answered = decoded(engine or engine_of(pair, num_speculative_tokens), pair, asked)
    _advance(watch)
    recorded = [_prompt(pair.target, prompt, encodings[prompt.id], answered.prompts[prompt.id]) for prompt in prompts]
    laws = [laws_at(pair.target.model, each.text_ids, each.positions) for each in recorded]
    texts = [each.text_ids for each in recorded]
    golden = Golden(
        name=name,
        provenances=(provenance,),
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=max_new_tokens,
        tokenizer=inputs.tokenizer,
        weights=inputs.weights,
        generation=inputs.generation,
        draft=inputs.draft,
        noise=noise_facts(pair.target.model, texts, chunk=num_speculative_tokens + 1),
        prompts=tuple(recorded),
        acceptance_rate=answered.acceptance_rate,
        expected_acceptance=answered.expected_acceptance,
    )
    _advance(watch)
    return Recording(golden=golden, arrays={**inputs.arrays, **_stacked(laws)})


def again(
    pair: Pair,
    old: Recording,
    *,
    provenance: Provenance,
    engine: Engine | None = None,
    watch: Watch | None = None,
) -> Recording:
    """The same layers now, each asked with what `old` recorded of the layer above (Note [Orthogonal layers])."""
    inputs = _inputs(pair)
    _advance(watch)
    golden = old.golden
    prompts = [each.prompt for each in golden.prompts]
    readable = [each for each in golden.prompts if _reads(pair, each)]
    ids = {each.prompt.id: each.encoding.ids for each in readable}
    asked = _asked(ids, prompts, golden.generation, golden.seed, golden.max_new_tokens)
    answered = decoded(engine or engine_of(pair, golden.num_speculative_tokens), pair, asked)
    _advance(watch)
    followed = [
        _prompt(
            pair.target,
            each.prompt,
            encoded_prompt(pair.target, each.prompt),
            answered.prompts.get(each.prompt.id, _NOTHING),
        )
        for each in golden.prompts
    ]
    texts = [each.text_ids for each in readable]
    now = dataclasses.replace(
        golden,
        provenances=(provenance,),
        tokenizer=inputs.tokenizer,
        weights=inputs.weights,
        generation=inputs.generation,
        draft=inputs.draft,
        noise=noise_facts(pair.target.model, texts, chunk=golden.num_speculative_tokens + 1)
        if texts
        else NoiseFacts(largest=0.0, margin_sd=0.0, num_positions=0),
        prompts=tuple(followed),
        acceptance_rate=answered.acceptance_rate,
        expected_acceptance=answered.expected_acceptance,
    )
    laws = _followed_laws(pair.target.model, old, {each.prompt.id for each in readable})
    behaviour = behaviour_of(pair, golden, asked, inputs.generation.params)
    _advance(watch)
    return Recording(golden=now, arrays={**inputs.arrays, **laws}, behaviour=behaviour)


def _inputs(pair: Pair) -> _Inputs:
    weights, arrays = weights_facts(pair.target)
    named = {f"target.{key}": value for key, value in arrays.items()}
    draft = None
    if pair.draft is not None:
        draft, arrays = weights_facts(pair.draft)
        named |= {f"draft.{key}": value for key, value in arrays.items()}
    return _Inputs(
        tokenizer=tokenizer_facts(pair.target),
        weights=weights,
        generation=generation_facts(pair.target),
        draft=draft,
        arrays=named | {"processors": processed_laws()},
    )


def _asked(
    ids: Mapping[str, tuple[int, ...]],
    prompts: Sequence[Prompt],
    generation: GenerationFacts,
    seed: int,
    max_new_tokens: int,
) -> Asked:
    return Asked(
        prompts=ids,
        domains={prompt.id: prompt.domain for prompt in prompts},
        params=generation.params,
        eos_token_ids=generation.eos_token_ids,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def _prompt(loaded: LoadedModel, prompt: Prompt, encoding: Encoding, said: DecodedPrompt) -> PromptGolden:
    text = rendered(loaded, prompt)
    ids = loaded.tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []
    return PromptGolden(
        prompt=prompt,
        encoding=encoding,
        template_text=text,
        template_ids=tuple(map(int, ids)),
        decoded=said,
        positions=positions_of(len(encoding.ids), len(encoding.ids) + len(said.target_only)),
    )


def _reads(pair: Pair, prompt: PromptGolden) -> bool:
    """Whether target and draft still have every id of the recording."""
    models = [one.model for one in (pair.target, pair.draft) if one is not None]
    return max(prompt.text_ids) < min(min(model.vocab_size, model.num_embeddings) for model in models)


def _stacked(laws: Sequence[Laws]) -> dict[str, Shaped[ndarray, ...]]:
    """The laws of all prompts, one after the other."""
    names = [each.name for each in dataclasses.fields(laws[0])]
    return {f"laws.{name}": np.concatenate([getattr(each, name) for each in laws]) for name in names}


def _followed_laws(target: LanguageModel, old: Recording, readable: set[str]) -> dict[str, Shaped[ndarray, ...]]:
    """The laws over the recorded texts, at the recorded ids; NaN for texts that the target can no longer read."""
    ids = old.arrays["laws.ids"]
    now = {name: value.copy() for name, value in old.arrays.items() if name.startswith("laws.")}
    start = 0
    for prompt in old.golden.prompts:
        rows = slice(start, start := start + len(prompt.positions))
        if prompt.prompt.id in readable:
            found = laws_at(target, prompt.text_ids, prompt.positions, ids[rows])
            for name, values in now.items():
                values[rows] = getattr(found, name.removeprefix("laws."))
        else:
            now["laws.logprobs"][rows] = np.nan
    return now


def _advance(watch: Watch | None) -> None:
    if watch is not None:
        watch.advance()
