"""How far a decoder's next token is from the target's law at real contexts, at any vocabulary, without sampling.

Note [Capturing]: a chain rule asks for three things: a draft, whether to accept it, and a token in its place or after it. Let
each row of a batch draft another id, answer every acceptance with no (or with yes), and note the laws that are asked for:
then the law of the first token is Σ q(x) [a(x) on x + (1 - a(x)) replacement(x)], and that of the bonus is what was asked for
after x. The drafter and the rule run as they are. Uniforms that are shared between two questions don't show in the laws
that are asked for; their closed forms are in `fault_law`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from specverify.choices import Stream
from specverify.context import Row, pad_vocab
from specverify.decoding import Decoder, speculative
from specverify.fault_law import NOISE_LAWS
from specverify.records import DecodeRequest, SamplingParams
from specverify.sampling import probabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.choices import Choices
    from specverify.models import LanguageModel

__all__ = ["StepDistance", "step_distance"]

_MOST_DRAFTS = 128
"""Ids that are tried as the draft, the likeliest first; of the others the rule is taken for right."""


@dataclass(frozen=True)
class StepDistance:
    """TV distances from the target's law, averages over contexts."""

    token: float
    """Of a token in a draft's place, accepted or replaced."""
    bonus: float
    """Of the token after a draft that was accepted."""

    def per_token(self, bonus_share: float) -> float:
        """Of a token of a stream with so many bonus tokens in it."""
        return (1 - bonus_share) * self.token + bonus_share * self.bonus


@dataclass
class _Captured:
    """Row b drafts `drafts[b]`; every acceptance is answered alike, and every law is noted."""

    drafts: Int[Tensor, " rows"]
    accepts: bool
    draft_laws: list[Float[Tensor, "rows vocab"]] = field(default_factory=list)
    accept_probs: list[Float[Tensor, " rows"]] = field(default_factory=list)
    next_laws: list[Float[Tensor, "rows vocab"]] = field(default_factory=list)

    def accept(self, prob: Tensor, *, stream: Stream, at: Tensor, leading: bool = False) -> Bool[Tensor, "rows n"]:
        del stream, at, leading
        if prob.shape[1]:  # nothing is drafted for the last token
            self.accept_probs.append(prob[:, 0])
        return torch.full_like(prob, self.accepts, dtype=torch.bool)

    def draw(
        self, probs: Tensor, *, stream: Stream | Tensor, at: Tensor, guesses: Tensor | None = None
    ) -> Int[Tensor, "rows n"]:
        del at, guesses
        law = probs[:, 0] / probs[:, 0].sum(-1, keepdim=True)
        if not isinstance(stream, torch.Tensor) and stream is Stream.DRAFT:
            self.draft_laws.append(law)
            return self.drafts[: len(law), None]
        self.next_laws.append(law)
        return law.argmax(-1)[:, None]

    def race(self, probs: Tensor, *, at: Tensor, guesses: Tensor | None = None) -> Int[Tensor, "rows n"]:
        del guesses
        return self.draw(probs, stream=Stream.TARGET, at=at)

    def moved(self, position: Tensor, step: Tensor) -> Choices:
        del position, step
        return self

    def select(self, rows: Tensor) -> Choices:
        del rows
        return self


def step_distance(
    decoder: Decoder, draft: LanguageModel, contexts: Sequence[Sequence[int]], *, fault: str = ""
) -> StepDistance:
    """Of a decoder over a chain, at temperature 1; `fault` names shared noise, whose law is a closed form."""
    tokens, bonuses = zip(*(_distances(decoder, draft, tuple(context), fault) for context in contexts), strict=True)
    return StepDistance(sum(tokens) / len(tokens), sum(bonuses) / len(bonuses))


def _distances(decoder: Decoder, draft: LanguageModel, context: tuple[int, ...], fault: str) -> tuple[float, float]:
    law = _law(decoder.target, [context], decoder.target.vocab_size)[0]
    if fault in NOISE_LAWS:
        reported = _law(draft, [context], decoder.target.vocab_size)[0]
        return _tv(NOISE_LAWS[fault](law[None], reported[None])[0], law), 0.0
    [really] = _captured(decoder, context, torch.zeros(1, dtype=torch.int64), accepts=False).draft_laws
    drafts = really[0].argsort(descending=True)[:_MOST_DRAFTS]
    drafts = drafts[really[0, drafts] > 0]
    weight = really[0, drafts]
    refused = _captured(decoder, context, drafts, accepts=False)
    accepted = weight * refused.accept_probs[0]
    emitted = torch.minimum(law, really[0]).index_copy(0, drafts, accepted)
    replacement = ((weight - accepted)[:, None] * refused.next_laws[0]).sum(0)
    if float(replacement.sum()) > 0:
        emitted += (1 - emitted.sum()) * replacement / replacement.sum()
    if not float(accepted.sum()) > 0:
        return _tv(emitted, law), 0.0
    bonus = _captured(decoder, context, drafts, accepts=True).next_laws[0]
    wanted = _law(decoder.target, [(*context, int(token)) for token in drafts], decoder.target.vocab_size)
    distance = (bonus - wanted).abs().sum(-1) / 2
    return _tv(emitted, law), float((accepted / accepted.sum() * distance).sum())


def _tv(one: Float[Tensor, " vocab"], other: Float[Tensor, " vocab"]) -> float:
    return float((one - other).abs().sum() / 2)


def _captured(decoder: Decoder, context: tuple[int, ...], drafts: Int[Tensor, " rows"], *, accepts: bool) -> _Captured:
    """One step with one draft in each row, and the token after it."""
    captured = _Captured(drafts, accepts)
    request = DecodeRequest(id="step", prompt_ids=context, params=SamplingParams(max_new_tokens=2))
    rows = [Row(request, number) for number in range(len(drafts))]
    asked = replace(decoder, choices=lambda _: captured, num_speculative_tokens=1)
    for _ in speculative(asked, rows):
        pass
    return captured


@torch.inference_mode()
def _law(model: LanguageModel, texts: Sequence[tuple[int, ...]], vocab_size: int) -> Float[Tensor, "rows vocab"]:
    """After each of some texts of one length."""
    logits = pad_vocab(model.logits(texts)[:, -1:], vocab_size)
    length = torch.full((len(texts), 1), len(texts[0]), device=logits.device)
    law = probabilities(
        logits,
        [SamplingParams()] * len(texts),
        token_ids=torch.tensor(texts, device=logits.device),
        prefix_lengths=length,
        prompt_lengths=length[:, 0],
    )
    return law[:, 0]
