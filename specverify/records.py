"""The nouns of specverify: frozen records that travel between the floors, standard library only.

Flow: `DecodeRequest` → engine → `DecodeTrace` → scorer → checks → `CheckResult` → judge → `Certificate`.
Units are in the names (`_s`, `_ms`, `_bytes`, `_tokens`); rates lie in [0, 1].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping  # noqa: TC003 - the codec resolves the annotations at run time
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

SCHEMA_VERSION = 2
"""Version of every JSON file that specverify writes."""


class Verdict(StrEnum):
    """What a check, or a whole run, says."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT_RUN"


class FinishReason(StrEnum):
    """Every way in which a decode can end."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


# ---------------------------------------------------------------------------------------------- asked and answered


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when a decode ends; the same for target and draft."""

    temperature: float = 1.0
    """0 is greedy: the law is a point mass on the largest logit, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least min_p times the largest; 0 keeps all."""
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    """No EOS before this many new tokens."""
    banned_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that must never be completed (`bad_words_ids` in transformers)."""
    max_new_tokens: int = 32
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a decode with `FinishReason.EOS`; the id itself is emitted."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a decode with `FinishReason.STOP`; the id itself is emitted."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a decode with `FinishReason.STOP` at the token that completes them."""

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass."""
        return self.temperature == 0

    @property
    def prefix_dependent(self) -> bool:
        """Whether the law depends on the tokens before it in another way than through the model."""
        return (
            self.repetition_penalty != 1
            or self.no_repeat_ngram_size > 0
            or self.min_new_tokens > 0
            or any(len(ids) > 1 for ids in self.banned_token_ids)
        )


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of the user's set."""

    id: str
    domain: str
    text: str
    messages: tuple[Message, ...] = ()
    """A conversation in place of the text: the target's chat template makes the prompt of it."""


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """One question to an engine: a prompt, how to sample, and how many samples."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    """64-bit; requests that should be independent need different seeds."""
    num_samples: int = 1
    speculation: bool = True
    """False asks for the target alone (the OFF arm)."""
    seeded: bool = True
    """False asks for randomness of the engine's own, as a user does who gives no seed."""
    prompt_id: str = ""
    """The prompt it was made from: the unit by which intervals are clustered."""
    domain: str = ""


@dataclass(frozen=True)
class DecodeStep:
    """One draft-and-verify step of one sequence."""

    num_draft_tokens: int
    num_accepted_tokens: int
    """Drafted tokens that were accepted and emitted; a token dropped after a stop is not counted."""
    num_emitted_tokens: int
    """Accepted tokens plus the residual or bonus token, unless a stop came before it."""
    draft_token_ids: tuple[int, ...] = ()
    """The drafts of a chain, where the engine shows them; those of a tree are not kept."""


@dataclass(frozen=True, kw_only=True)
class DecodeTrace:
    """What an engine answered: the emitted ids (EOS included) of one sample, and its steps where they are known."""

    request: DecodeRequest
    sample: int
    token_ids: tuple[int, ...]
    finish: FinishReason
    steps: tuple[DecodeStep, ...] = ()
    logprobs: tuple[float, ...] = ()
    """The natural log-probability that the engine reports of each token: a claim to check, never evidence."""


@dataclass(frozen=True, kw_only=True)
class DecodeCounters:
    """The counters of everyone's dashboards, under the names that vLLM gives them."""

    num_drafts: int | None
    """Steps in which at least one token was drafted; None of an engine that doesn't tell."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, in [0, 1]; NaN when nothing was drafted. Not Σ min(p, q)."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens a drafting step emits, the bonus or residual token included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")

    def __add__(self, other: DecodeCounters) -> DecodeCounters:
        """Of both together."""
        by_place = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        known = self.num_drafts is not None and other.num_drafts is not None
        return DecodeCounters(
            num_drafts=(self.num_drafts or 0) + (other.num_drafts or 0) if known else None,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(map(sum, by_place)),
        )


def count(traces: Iterable[DecodeTrace]) -> DecodeCounters:
    """Recompute the counters from the steps of `traces`."""
    kinds = Counter(
        (step.num_draft_tokens, step.num_accepted_tokens)
        for trace in traces
        for step in trace.steps
        if step.num_draft_tokens
    )
    longest = max((drafted for drafted, _ in kinds), default=0)
    return DecodeCounters(
        num_drafts=kinds.total(),
        num_draft_tokens=sum(drafted * times for (drafted, _), times in kinds.items()),
        num_accepted_tokens=sum(accepted * times for (_, accepted), times in kinds.items()),
        num_accepted_tokens_per_pos=tuple(
            sum(times for (_, accepted), times in kinds.items() if accepted > position) for position in range(longest)
        ),
    )


# ---------------------------------------------------------------------------------------------- what a check says


@dataclass(frozen=True, kw_only=True)
class StatisticalTest:
    """One test's outcome against its share of the error budget."""

    name: str
    statistic: float
    p_value: float | None = None
    """Exact or conservative; None for a test that reports an e-value or needs no statistics."""
    log10_e: float | None = None
    """log10 of the e-value against the claim; anytime-valid."""
    allowed: float
    """The p-value below which it fails, or the log10 e-value at which it fails."""
    failed: bool
    num_samples: int
    smallest_detectable: float | None = None
    """The smallest effect (in `effect_unit`) that it reliably sees with these samples."""
    effect_unit: str = "TV distance"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was seen: what, where, and the numbers with their allowance."""

    text: str
    severity: Verdict = Verdict.FAIL
    """FAIL breaks the claim; INCONCLUSIVE weakens it; PASS is worth knowing."""
    place: str = ""
    """Prompt, position, id or file."""


class PlotKind(StrEnum):
    """How the report draws a plot."""

    LINE = "line"
    STEP = "step"
    BAR = "bar"
    SCATTER = "scatter"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of bars or points."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Lower interval ends, or empty."""
    high: tuple[float, ...] = ()
    dashed: bool = False
    """A reference (the diagonal, a limit), not a measurement."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture as data; the report draws it and computes nothing."""

    id: str
    title: str
    x_label: str
    y_label: str
    kind: PlotKind
    series: tuple[Series, ...]
    caption: str = ""
    """One sentence: how to read it."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A claim, its verdict, and everything that one needs to believe it."""

    id: str
    claim: str
    verdict: Verdict
    summary: str
    """One sentence with the decisive numbers."""
    findings: tuple[Finding, ...] = ()
    tests: tuple[StatisticalTest, ...] = ()
    measurements: Mapping[str, float | int | str] = field(default_factory=dict)
    """Named figures, units in the names."""
    num_samples: int = 0
    sample_unit: str = "tokens"
    smallest_detectable: float | None = None
    """The smallest effect that this check would have seen, in `effect_unit`."""
    effect_unit: str = ""
    advice: str = ""
    """What to do now, when the verdict is not PASS."""
    reproduce: str = ""
    """One command that shows it again."""
    plots: tuple[Plot, ...] = ()
    elapsed_s: float = 0.0


# ---------------------------------------------------------------------------------------------- the certificate


@dataclass(frozen=True, kw_only=True)
class ModelFingerprint:
    """sha-256 digests of everything that decides what a model says."""

    name: str
    """As the user gave it."""
    architecture: str
    num_parameters: int
    vocab_size: int
    """Rows of the output layer (may be padded beyond the tokenizer)."""
    weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    config_sha256: str
    files: Mapping[str, str] = field(default_factory=dict)
    """File name to sha-256, where the model is a local folder."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run was made; every record carries it."""

    specverify: str
    python: str
    torch: str
    transformers: str
    device: str
    """e.g. `cpu` or `cuda: NVIDIA H200`."""
    dtype: str
    num_threads: int
    platform: str
    cpu: str
    tensor_parallel: int = 1
    """Processes that held the target together, by transformers' plan for its architecture."""


@dataclass(frozen=True, kw_only=True)
class ErrorBudget:
    """How often a healthy pair may be failed by chance, and how that is shared."""

    false_fail_rate: float
    """In all, per run."""
    e_process_rate: float
    """The part spent on e-processes (each fails at e >= number of e-processes / rate)."""
    p_value_rate: float
    """The part spent on p-values (Holm over all of the run)."""
    num_e_processes: int
    num_p_values: int


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome of one run of `specverify certify`."""

    schema_version: int = SCHEMA_VERSION
    created: str
    """ISO 8601, UTC."""
    command: str
    verdict: Verdict
    headline: str
    """One sentence: may it go out, and if not, why."""
    target: ModelFingerprint
    draft: ModelFingerprint | None
    engine: str
    fault: str = ""
    """The planted fault, when the run was a demonstration; such a certificate is worth nothing."""
    trust_remote_code: bool = False
    environment: Environment
    plan: Mapping[str, object] = field(default_factory=dict)
    plan_sha256: str
    seed: int
    num_prompts: int = 0
    prompts_sha256: str = ""
    """Over ids, domains and token ids of the prompts that were used."""
    checks: tuple[CheckResult, ...]
    error_budget: ErrorBudget
    elapsed_s: float

    @property
    def whole(self) -> bool:
        """Whether all checks were asked, and no fault was planted."""
        return not self.plan.get("only") and not self.fault

    @property
    def lets_out(self) -> bool:
        """Whether the pair may go out: PASS of the `whole`, which PASS of some checks is not."""
        return self.whole and self.verdict is Verdict.PASS


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole from its parts: FAIL over INCONCLUSIVE over PASS; parts that did not run say nothing."""
    seen = set(verdicts)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS):
        if verdict in seen:
            return verdict
    return Verdict.NOT_RUN
