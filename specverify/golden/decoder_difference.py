"""The decoder, compared: the same prompts, parameters and seeds; ids, steps, accepted drafts. See Note [Allowed noise]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from specverify.golden.output_difference import FALSE_ALARM_RATE, dtype_of, noise_between
from specverify.golden.records import Change, DecodedSample, Layer, LayerVerdict
from specverify.records import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from numpy import ndarray

    from specverify.golden.records import PromptGolden, Recording

__all__ = ["decoder_verdict"]


def decoder_verdict(old: Recording, new: Recording, *, explained: str) -> LayerVerdict:
    """The same prompts, parameters and seeds through the decoder: ids, steps and accepted drafts."""
    if dtype_of(old) != dtype_of(new):
        summary = f"recorded in {dtype_of(old)}, checked in {dtype_of(new)}: texts of two dtypes part early, so they are not compared"
        return LayerVerdict(layer=Layer.DECODER, change=Change.NOT_COMPARED, verdict=Verdict.NOT_RUN, summary=summary)
    noise = noise_between(old, new)
    texts = list(_texts(old, new))
    parted = [each for each in texts if each.differs]
    wide = [each for each in parted if each.greedy and each.margin > 2 * noise.largest]
    pools = [_Pool([each for each in texts if each.speculative and each.greedy is greedy]) for greedy in (True, False)]
    allowed = sum(pool.allowed(noise.share) for pool in pools)
    measured = {
        "texts": len(texts),
        "texts_that_part": len(parted),
        "allowed_to_part": allowed,
        "acceptance_rate_then": old.golden.acceptance_rate,
        "acceptance_rate_now": new.golden.acceptance_rate,
    }
    text = f"{len(parted)} of {len(texts)} texts have other ids or steps"
    beyond = [pool for pool in pools if pool.parted > pool.allowed(noise.share)]
    if parted and pools[1].allowed(noise.share) >= len(pools[1].texts) and not (explained or wide or beyond):
        summary = f"{text}, and rounding alone may part every one in {dtype_of(old)}: the decoder is judged where numbers are the same"
        return LayerVerdict(
            layer=Layer.DECODER, change=Change.NOT_COMPARED, verdict=Verdict.NOT_RUN, summary=summary,
            measurements=measured,
        )  # fmt: skip
    if not parted or not (explained or wide or beyond):
        more = f"; rounding explains up to {allowed}" if parted else ""
        return LayerVerdict(
            layer=Layer.DECODER, change=Change.UNCHANGED, verdict=Verdict.PASS, summary=text + more,
            measurements=measured,
        )  # fmt: skip
    findings = tuple(Finding(text=each.told(), place=each.place) for each in (*wide, *parted)[:4])
    if explained:
        return LayerVerdict(
            layer=Layer.DECODER, change=Change.CONSEQUENCE, verdict=Verdict.FAIL,
            summary=f"{text}, as {explained} explains", findings=findings, measurements=measured,
        )  # fmt: skip
    kinds = tuple(dict.fromkeys(each.kind() for each in parted))
    return LayerVerdict(
        layer=Layer.DECODER,
        change=Change.CAUSE,
        verdict=Verdict.FAIL,
        summary=f"{text}, though models, numbers and parameters are the same; rounding explains {allowed}",
        parts=kinds,
        findings=findings,
        measurements=measured,
        advice="drafting, acceptance, random streams or rollback work otherwise: run specverify certify --only exactness,lossless,greedy",
    )


@dataclass(frozen=True)
class _Pool:
    """Speculative texts of one kind: greedy, or sampled."""

    texts: list[_Text]

    @property
    def parted(self) -> int:
        """Those that differ."""
        return sum(each.differs for each in self.texts)

    def allowed(self, share: float) -> int:
        """Those that rounding may part: exceeded by chance with probability `FALSE_ALARM_RATE` / 2.

        Of all sums of independent events with the same mean, the binomial has the heaviest tail [Hoeffding1956].
        """
        if not share or not self.texts:
            return 0
        decisions = [len(each.old.token_ids) + 2 * sum(each.old.drafted) for each in self.texts]
        mean = float(np.mean([-math.expm1(-number * share) for number in decisions]))
        return int(stats.binom.isf(FALSE_ALARM_RATE / 2, len(self.texts), mean))


@dataclass(frozen=True, kw_only=True)
class _Text:
    """One text of both recordings."""

    place: str
    old: DecodedSample
    new: DecodedSample
    greedy: bool
    speculative: bool = True
    margin: float
    """Of the recorded law where the greedy texts part; NaN where they don't."""

    @property
    def differs(self) -> bool:
        return self.old != self.new

    def kind(self) -> str:
        """What differs first."""
        if self.old.token_ids != self.new.token_ids:
            return "greedy ids" if self.greedy else "sampled ids"
        return "drafted tokens" if self.old.drafted != self.new.drafted else "accepted tokens"

    def told(self) -> str:
        """Where it begins to differ."""
        pairs = [(self.old.token_ids, self.new.token_ids, "token"), (self.old.accepted, self.new.accepted, "step"),
                 (self.old.drafted, self.new.drafted, "step")]  # fmt: skip
        one, other, unit = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        place = _first(one, other)
        seen = [str(side[place]) if place < len(side) else "nothing" for side in (one, other)]
        what = {"token": "id", "step": "accepted"}[unit] if one is not self.old.drafted else "drafted"
        return f"{unit} {place} is the first that differs ({what} {seen[0]} became {seen[1]})"


def _first(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _texts(old: Recording, new: Recording) -> Iterator[_Text]:
    row = 0
    for then, now in zip(old.golden.prompts, new.golden.prompts, strict=True):
        margins = old.arrays["laws.margin"][row : row + len(then.positions)]
        row += len(then.positions)
        if not now.decoded.target_only:  # it could not be read any more
            continue
        name = then.prompt.id
        one, other = (_bare(each.decoded.target_only) for each in (then, now))
        yield replace(_greedy(f"{name}, without speculation", then, one, other, margins), speculative=False)
        yield _greedy(f"{name}, speculative", then, then.decoded.greedy, now.decoded.greedy, margins)
        for number, (one, other) in enumerate(zip(then.decoded.sampled, now.decoded.sampled, strict=False)):
            yield _Text(place=f"{name}, sample {number}", old=one, new=other, greedy=False, margin=math.nan)


def _bare(ids: tuple[int, ...]) -> DecodedSample:
    return DecodedSample(token_ids=ids, drafted=(), accepted=())


def _greedy(
    place: str, prompt: PromptGolden, old: DecodedSample, new: DecodedSample, margins: Float[ndarray, " positions"]
) -> _Text:
    """With the margin at the first token that differs, where the recorded law is that of the recorded greedy text."""
    at = len(prompt.encoding.ids) + _first(old.token_ids, new.token_ids)
    known = old.token_ids != new.token_ids and at in prompt.positions
    margin = float(margins[prompt.positions.index(at)]) if known else math.nan
    return _Text(place=place, old=old, new=new, greedy=True, margin=margin)
