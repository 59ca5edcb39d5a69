"""The plan of a certification: what is asked, how much of it, and what would be enough. Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specverify.records import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUDGETS", "CHECK_IDS", "ON_REQUEST_IDS", "PARAMETER_GRID", "Plan", "plan_digest", "settings_digest"]

CHECK_IDS = (
    "compatibility", "exactness", "boundary", "greedy", "stopping", "reproducibility", "parameters", "lossless", "acceptance", "cost",
)  # fmt: skip
"""Of `certify.CHECKS`, in their order, where torch must not be imported to know them."""
ON_REQUEST_IDS = ("two-arms",)
"""Of `certify.ON_REQUEST`: run where they are named, or with `--budget deep`."""

PARAMETER_GRID: tuple[tuple[str, SamplingParams], ...] = (
    ("temperature", SamplingParams(temperature=0.6)),
    ("top_k", SamplingParams(top_k=20)),
    ("top_p", SamplingParams(top_p=0.8)),
    ("min_p", SamplingParams(min_p=0.05)),
    ("repetition_penalty", SamplingParams(repetition_penalty=1.5)),
    ("banned_words", SamplingParams(banned_token_ids=())),
    ("no_repeat", SamplingParams(no_repeat_ngram_size=1)),
    ("combined", SamplingParams(temperature=0.8, top_k=50, top_p=0.95, no_repeat_ngram_size=3, min_new_tokens=8)),
)
"""The cells of the `parameters` check; `banned_words` gets its ids from the pair (its likeliest tokens)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a certification asks, how much, and what would be enough; the digest of it goes into the certificate."""

    budget: str = "standard"
    seed: int = 17
    num_speculative_tokens: int = 3
    device: str = "auto"
    """`auto` is CUDA where there is one, otherwise the CPU."""
    dtype: str = "float32"
    batch_size: int = 128
    max_prompts: int = 64
    max_new_tokens: int = 64
    params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of the lossless and acceptance checks."""
    lossless_tokens: int = 7_000
    """Most tokens scored by the lossless check; the e-process may stop it earlier, but only with FAIL."""
    first_token_samples: int = 600
    """Samples of the first token, at each of `first_token_prompts` prompts."""
    first_token_prompts: int = 4
    coupled_draws: int = 1_375
    """Steps in which the rule runs beside a second implementation: none different bounds TV by ln(1e6)/n, here 0.01."""
    two_arms_tokens: int = 4_000
    """Tokens of each arm of the `two-arms` check, at most."""
    parameter_tokens: int = 960
    """Tokens scored in each cell of the parameter grid."""
    greedy_prompts: int = 12
    cost_repeats: int = 10
    """Interleaved pairs of timed decodes."""
    false_fail_rate: float = 1e-6
    """How often a healthy pair may be failed by chance, per run in all."""
    false_pass_rate: float = 0.1
    """How often a fault of the reported smallest detectable size may be missed."""
    largest_undetected_shift: float = 0.05
    """A pass whose stream could hide a larger shift of the mean PIT law (Kolmogorov distance) is INCONCLUSIVE."""
    largest_undetected_shift_per_setting: float = 0.2
    """The same of each setting of the parameter grid, which has fewer tokens."""
    largest_undetected_acceptance: float = 0.1
    """A pass that could hide a larger difference between measured and expected acceptance is INCONCLUSIVE."""
    minimum_speedup: float = 1.0
    """Below this the pair is refused a rollout on cost."""
    minimum_acceptance: float = 0.0
    """Expected acceptance Σ min(p, q) below which the pair is refused."""
    only: tuple[str, ...] = ()
    """Ids of the checks to run; empty runs all."""


BUDGETS: dict[str, dict[str, int | float]] = {
    "quick": {
        "lossless_tokens": 5_000, "first_token_samples": 400, "parameter_tokens": 400, "greedy_prompts": 8,
        "cost_repeats": 6, "largest_undetected_shift": 0.1, "largest_undetected_shift_per_setting": 0.3,
    },
    "standard": {},
    "deep": {
        "coupled_draws": 138_149, "lossless_tokens": 200_000, "first_token_samples": 10_000, "first_token_prompts": 8, "parameter_tokens": 20_000,
        "greedy_prompts": 64, "two_arms_tokens": 16_384, "cost_repeats": 40, "largest_undetected_shift": 0.02,
        "largest_undetected_shift_per_setting": 0.05,
    },
}  # fmt: skip
"""What each `--budget` changes in the plan."""


def plan_digest(plan: Plan) -> str:
    """sha-256 of the plan's canonical JSON: two certificates with the same digest asked the same."""
    return settings_digest(dataclasses.asdict(plan))


def settings_digest(settings: Mapping[str, object]) -> str:
    """The same of a plan as a certificate holds it."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
