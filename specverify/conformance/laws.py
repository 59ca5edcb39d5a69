"""What an engine's answers are held against: exact laws of target and draft, prompts, and the arms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specverify.decoding import Decoder
from specverify.drafting import NoDraft
from specverify.engines.arms import Guarded, TargetOnly, TwoArms
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PlanError
from specverify.models.fingerprint import fingerprint
from specverify.models.loading import load_model
from specverify.records import ModelFingerprint
from specverify.subject import EncodedPrompt, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from jaxtyping import Float
    from torch import Tensor

    from specverify.engines import Engine
    from specverify.models import LanguageModel, Session
    from specverify.models.loading import LoadedModel

__all__ = ["Laws", "laws_of_folders", "laws_of_models", "off_subject", "on_subject", "require_off"]

_PROMPTS = 24
_LONGEST = 14


@dataclass(frozen=True)
class _Judge:
    """Logits in float64; sessions in float32, so that the measured noise is that of an engine's dtype."""

    exact: LanguageModel
    usual: LanguageModel
    max_length: int
    """Positions of the engine, where it was given fewer than the model has."""

    @property
    def name(self) -> str:
        return self.usual.name

    @property
    def vocab_size(self) -> int:
        return self.exact.vocab_size

    @property
    def num_embeddings(self) -> int:
        return self.exact.num_embeddings

    @property
    def device(self) -> torch.device:
        return self.exact.device

    def open(self, prompts: Sequence[Sequence[int]]) -> Session:
        return self.usual.open(prompts)

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        return self.exact.logits(sequences)


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The calibration pair as the judge sees it."""

    target: LanguageModel
    draft: LanguageModel | None
    prompts: tuple[EncodedPrompt, ...]
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[Sequence[int]], str] | None = None
    fingerprints: tuple[ModelFingerprint, ModelFingerprint | None]
    engine_noise: float = 0.0
    """Logits that the engine is seen to be off without speculation, where it is asked to compute in half precision."""


def laws_of_folders(
    target: Path, draft: Path | None, *, eos_token_ids: Sequence[int], max_length: int, seed: int, name: str = ""
) -> Laws:
    """Two folders in the Hugging Face layout, computed in float64; `name` is told in place of a folder's path.

    Raises `PairError`.
    """
    loaded = load_model(target, device="cpu", dtype="float64")
    usual = load_model(target, device="cpu", dtype="float32").model
    drafting = load_model(draft, device="cpu", dtype="float64") if draft is not None else None
    tokenizer = loaded.tokenizer
    judge = _Judge(loaded.model, usual, min(max_length, loaded.model.max_length))
    return Laws(
        target=judge,
        draft=drafting.model if drafting is not None else None,
        prompts=random_prompts(loaded.model.vocab_size, eos_token_ids, seed=seed),
        eos_token_ids=tuple(eos_token_ids),
        detokenize=lambda ids: str(tokenizer.decode(list(ids))),
        fingerprints=(_told(loaded, name), _told(drafting, name and "its draft") if drafting is not None else None),
    )


def laws_of_models(
    target: LanguageModel,
    draft: LanguageModel | None,
    *,
    eos_token_ids: Sequence[int],
    seed: int,
    detokenize: Callable[[Sequence[int]], str] | None = None,
) -> Laws:
    """Models whose laws are known already, such as those of the fake."""
    return Laws(
        target=target,
        draft=draft,
        prompts=random_prompts(target.vocab_size, eos_token_ids, seed=seed),
        eos_token_ids=tuple(eos_token_ids),
        detokenize=detokenize,
        fingerprints=(_bare(target), _bare(draft) if draft is not None else None),
    )


def _told(loaded: LoadedModel, name: str) -> ModelFingerprint:
    digests = fingerprint(loaded)
    return replace(digests, name=name or digests.name)


def _bare(model: LanguageModel) -> ModelFingerprint:
    return ModelFingerprint(
        name=model.name, architecture="table", num_parameters=0, vocab_size=model.vocab_size,
        weights_sha256="", tokenizer_sha256="", template_sha256="", config_sha256="",
    )  # fmt: skip


def random_prompts(vocab_size: int, eos_token_ids: Sequence[int], *, seed: int) -> tuple[EncodedPrompt, ...]:
    """Of every length up to `_LONGEST`; every second one repeats itself, so that a look-up drafts there and not elsewhere."""
    random = np.random.default_rng(seed)
    ordinary = [token for token in range(vocab_size) if token not in eos_token_ids]
    prompts = []
    for number in range(_PROMPTS):
        length = 2 + number % (_LONGEST - 1)
        ids = [ordinary[int(place)] for place in random.integers(len(ordinary), size=length)]
        if number % 2:
            ids = (ids[: -(-length // 2)] * 2)[:length]
        domain = "repeating" if number % 2 else "random"
        prompts.append(EncodedPrompt(id=f"p{number}", domain=domain, token_ids=tuple(ids)))
    return tuple(prompts)


def on_subject(engine: Engine, off: Engine | None, laws: Laws, *, command: str, workers: int = 1) -> Subject:
    """The engine under test; where there is no OFF arm of its own, the target alone is decoded here."""
    alone = off if off is not None else _decoded_here(laws)
    return _subject(TwoArms(Guarded(engine), Guarded(alone)), laws, command=command, workers=workers)


def require_off(off: Engine | None, *, scorer: str) -> Engine:
    """The engine without speculation. Raises `PlanError` where there is none."""
    if off is None:
        msg = (
            f"--score-by {scorer} needs the engine without speculation, too: name it with --off module:callable, or a server's with "
            "--option off_url=U or --option serve_off=CMD"
        )
        raise PlanError(msg)
    return off


def off_subject(off: Engine, laws: Laws, *, command: str, workers: int = 1) -> Subject:
    """The OFF arm, held to the same claims."""
    return _subject(TargetOnly(Guarded(off)), laws, command=command, workers=workers)


def _subject(engine: Engine, laws: Laws, *, command: str, workers: int) -> Subject:
    return Subject(
        engine=engine,
        target=laws.target,
        draft=laws.draft,
        prompts=laws.prompts,
        eos_token_ids=laws.eos_token_ids,
        detokenize=laws.detokenize,
        workers=workers,
        command=command,
        engine_noise=laws.engine_noise,
    )


def _decoded_here(laws: Laws) -> Engine:
    return ReferenceEngine(
        Decoder(target=laws.target, drafter=NoDraft(laws.target.vocab_size), detokenize=laws.detokenize)
    )
