"""What a run is about: the engine under test, the target that judges it, and the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.decoding import Decoder
    from specverify.engines import Engine
    from specverify.models import LanguageModel
    from specverify.models.loading import Pair
    from specverify.parallel import Elsewhere

__all__ = ["EncodedPrompt", "Subject"]


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt in the target's ids."""

    id: str
    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine, and the models that its answers are held against."""

    engine: Engine
    target: LanguageModel
    draft: LanguageModel | None
    """None where the draft's law is not known (prompt lookup, a black box)."""
    prompts: tuple[EncodedPrompt, ...]
    eos_token_ids: tuple[int, ...] = ()
    decoder: Decoder | None = None
    """The reference decoder's parts, where it is what is under test: its rule can then be proved, its models timed."""
    pair: Pair | None = None
    """Tokenizers and configurations, where the models came from folders."""
    detokenize: Callable[[Sequence[int]], str] | None = None
    """Ids to text, where it is neither the reference decoder's nor the pair's tokenizer's."""
    rule: str = ""
    """The rule that the engine says it follows; where it is `chain`, and steps show their drafts, each stage is tested."""
    workers: int = 1
    """Pieces of scoring done side by side; changes no result."""
    elsewhere: Elsewhere | None = None
    """Processes that score in place of this one; changes no result."""
    drafts_follow_law: bool = True
    """Whether drafts are drawn from the law of `draft`, not chosen (prompt lookup, a script)."""
    engine_noise: float = 0.0
    """Logits by which somebody else's engine is seen to differ from the target without speculation: its dtype, its kernels."""
    command: str = "specverify certify"
    """The command line up to its options, for `reproduce` lines."""
