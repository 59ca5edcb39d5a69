"""The nouns of goldens: what is recorded of each layer, and what a comparison says. Standard library and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the codec resolves the annotations at run time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from specverify.records import Environment, Finding, ModelFingerprint, Prompt, SamplingParams, Verdict

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from numpy import ndarray

__all__ = [
    "GOLDEN_SCHEMA_VERSION",
    "Behaviour",
    "Change",
    "DecodedPrompt",
    "DecodedSample",
    "Encoding",
    "GenerationFacts",
    "Golden",
    "GoldenReport",
    "Layer",
    "LayerVerdict",
    "NoiseFacts",
    "PromptGolden",
    "Provenance",
    "Recording",
    "TensorFacts",
    "TokenizerFacts",
    "WeightsFacts",
]

GOLDEN_SCHEMA_VERSION = 1
"""Of `golden.json`; an older one has to be recorded again."""


class Layer(StrEnum):
    """What can change, in the order in which it acts."""

    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"
    NUMERICS = "numerics"
    SAMPLING = "sampling"
    DRAFT = "draft"
    DECODER = "decoder"
    BEHAVIOUR = "behaviour"


class Change(StrEnum):
    """What a comparison says of a layer."""

    UNCHANGED = "unchanged"
    CAUSE = "changed"
    """And no layer above it explains that."""
    CONSEQUENCE = "follows"
    """It differs, as it must after a change above it."""
    NOT_COMPARED = "not compared"
    """Recorded on another device or dtype, or without what it needs."""


# ------------------------------------------------------------------------------------------------ what is recorded


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Who made a recording, with what, and why."""

    created: str
    """ISO 8601, UTC."""
    command: str
    git_commit: str
    """Of the working folder, with `+` where it has changes; empty outside a repository."""
    reason: str
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A text as the tokenizer reads it, and reads it back."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    """Start and end of each token in characters, one after the other; empty where the tokenizer knows none."""
    round_trip: str = ""
    """The ids decoded again, special tokens kept."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What decides which ids a text becomes. `parts` holds the tokenizer's own serialisation, piece by piece."""

    kind: str
    files_sha256: str
    parts: Mapping[str, str] = field(default_factory=dict)
    """Canonical JSON of normaliser, pre-tokenizer, model settings, vocabulary, merges, added tokens, post-processor, decoder."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Role to `token (id)`."""
    before: tuple[int, ...] = ()
    """Ids that encoding puts before a text."""
    after: tuple[int, ...] = ()
    chat_template: str = ""
    probes: tuple[Encoding, ...] = ()
    """Texts made to provoke, without special tokens."""


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """A model's configuration and the digest of each of its tensors."""

    fingerprint: ModelFingerprint
    config: Mapping[str, str] = field(default_factory=dict)
    """Key to JSON, without what a library version or the sampling writes there."""
    tensors: tuple[TensorFacts, ...] = ()
    embedding: str = ""
    """Name of the input embedding, whose rows are digested singly."""


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """How the next token is chosen unless somebody says otherwise, and where a text ends."""

    stated: Mapping[str, str] = field(default_factory=dict)
    """Key to JSON of generation_config.json, and the `*_token_id` keys of config.json."""
    effective: Mapping[str, str] = field(default_factory=dict)
    """What the library makes of it."""
    eos_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    """What sampled texts are recorded with."""


@dataclass(frozen=True, kw_only=True)
class NoiseFacts:
    """Differences of log-probabilities between legitimate execution shapes, measured on the machine."""

    largest: float
    margin_sd: float
    num_positions: int


@dataclass(frozen=True, kw_only=True)
class DecodedSample:
    """One speculative text: its ids, and how many drafts each step verified and accepted."""

    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """What the reference decoder made of a prompt."""

    target_only: tuple[int, ...]
    """Greedy, without speculation."""
    greedy: DecodedSample
    sampled: tuple[DecodedSample, ...] = ()
    expected_acceptance: float = float("nan")
    """Mean Σ min(p, q) over the sampled texts; NaN without a draft's law."""


@dataclass(frozen=True, kw_only=True)
class PromptGolden:
    """One prompt through all layers; its log-probabilities are in the recording's arrays."""

    prompt: Prompt
    encoding: Encoding
    template_text: str = ""
    """The prompt as the chat template renders it, as one turn of a user where it is no conversation."""
    template_ids: tuple[int, ...] = ()
    decoded: DecodedPrompt
    positions: tuple[int, ...] = ()
    """Places in prompt + greedy text whose law is recorded: the law of the token there."""
    recording: int = 0
    """Which of the golden's provenances it comes from."""

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Prompt and greedy text: what log-probabilities are recorded over."""
        return self.encoding.ids + self.decoded.target_only


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What is written to `golden/<pair>/golden.json`."""

    schema_version: int = GOLDEN_SCHEMA_VERSION
    name: str
    provenances: tuple[Provenance, ...]
    seed: int
    num_speculative_tokens: int
    max_new_tokens: int
    tokenizer: TokenizerFacts
    weights: WeightsFacts
    generation: GenerationFacts
    draft: WeightsFacts | None
    noise: NoiseFacts
    prompts: tuple[PromptGolden, ...]
    acceptance_rate: float
    """Accepted / drafted tokens of the sampled texts."""
    expected_acceptance: float
    """Mean Σ min(p, q) over the sampled texts; NaN without a draft's law."""
    files_sha256: Mapping[str, str] = field(default_factory=dict)
    """Of the files beside this one: a golden of two halves is refused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Behaviour:
    """Recorded samples under the present target and parameters."""

    log10_e: float
    """Largest evidence so far that they don't follow it."""
    likeliest: str
    num_tokens: int
    num_impossible: int
    """Tokens that have probability 0 now."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A golden with its arrays; or what the pair does now, asked with a golden's ids."""

    golden: Golden
    arrays: Mapping[str, Shaped[ndarray, ...]]
    behaviour: Behaviour | None = None
    """Only of what the pair does now."""


# ------------------------------------------------------------------------------------------------ what is said of it


@dataclass(frozen=True, kw_only=True)
class LayerVerdict:
    """What became of a layer, with the evidence, and what to do."""

    layer: Layer
    change: Change
    verdict: Verdict
    summary: str
    parts: tuple[str, ...] = ()
    """Which of its parts changed, the first to act first: `normaliser`, `merges`, `eos_token_id`."""
    findings: tuple[Finding, ...] = ()
    measurements: Mapping[str, float | int | str] = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class GoldenReport:
    """A pair against its golden."""

    name: str
    verdict: Verdict
    headline: str
    causes: tuple[Layer, ...]
    """Layers that changed by themselves, the first to act first."""
    layers: tuple[LayerVerdict, ...]
    notes: tuple[str, ...] = ()
    """In what the two runs differ: device, dtype, releases."""
    missing: tuple[str, ...] = ()
    """Prompts that have no golden yet."""
    unused: tuple[str, ...] = ()
    """Recorded prompts that are asked for no more."""
    recorded: tuple[Provenance, ...]
    environment: Environment
    elapsed_s: float = 0.0
