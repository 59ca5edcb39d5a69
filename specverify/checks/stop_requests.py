"""What the `stopping` check asks: stops put on tokens of every offset of a block, and where each must end a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specverify.checks.check import asked, spread
from specverify.engines import Capability
from specverify.records import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from specverify.checks.check import Round
    from specverify.plan import Plan
    from specverify.records import DecodeRequest, DecodeStep
    from specverify.subject import EncodedPrompt, Subject

__all__ = ["OWN", "Ending", "detokenizer", "ended", "named", "places_of", "reference_key", "rounds"]

_PILOTS = 24
"""Prompts whose texts are searched for stops at every offset."""
_STOPS_PER_PLACE = 3
"""Prompts in which each kind of stop falls at each offset."""
_LEAST_TOKENS = 12
_FEW_IDS = (8, 4, 2)
"""Ids that are left where a poor draft has to agree: fewer and fewer, until every offset is reached."""
_MOST_LIMITS = 8
OWN = -1
"""In the place of an offset: the token is the target's own (residual or bonus), not an accepted draft."""

Detokenize = Callable[[Sequence[int]], str]


# ------------------------------------------------------------------------------------------------- what must come out


@dataclass(frozen=True)
class Ending:
    """Emitted ids and why they end; `finish` is None where the text is too short to reach an end."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None


def ended(ids: tuple[int, ...], params: SamplingParams, detokenize: Detokenize | None) -> Ending:
    """`ids` cut where a decode with `params` must end, written independently of the decoder."""
    for place, token in enumerate(ids[: params.max_new_tokens]):
        kept = ids[: place + 1]
        if token in params.eos_token_ids and place >= params.min_new_tokens:
            return Ending(kept, FinishReason.EOS)
        if token in params.stop_token_ids:
            return Ending(kept, FinishReason.STOP)
        if params.stop_strings and detokenize and any(stop in detokenize(kept) for stop in params.stop_strings):
            return Ending(kept, FinishReason.STOP)
    limited = len(ids) >= params.max_new_tokens
    return Ending(ids[: params.max_new_tokens], FinishReason.LENGTH if limited else None)


def places_of(steps: Sequence[DecodeStep]) -> list[int]:
    """For each emitted token its offset among its block's accepted drafts, or `OWN`."""
    return [
        offset if offset < step.num_accepted_tokens else OWN
        for step in steps
        for offset in range(step.num_emitted_tokens)
    ]


def named(place: int) -> str:
    """How a sentence calls a place."""
    return "the target's own token" if place == OWN else f"offset {place}"


# ------------------------------------------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class _Text:
    """A text without stops, and the place of each of its tokens."""

    prompt: EncodedPrompt
    params: SamplingParams
    token_ids: tuple[int, ...]
    places: tuple[int, ...]

    def first_uses(self) -> list[int]:
        """Positions whose token was not emitted before: a stop on it falls there and nowhere earlier."""
        return [at for at, token in enumerate(self.token_ids) if token not in self.token_ids[:at]]


def _base(plan: Plan) -> SamplingParams:
    """Greedy, without any stop, and long enough for a stop at each offset of a second block."""
    return SamplingParams(temperature=0, max_new_tokens=max(_LEAST_TOKENS, 2 * plan.num_speculative_tokens + 4))


def _pilots(subject: Subject, plan: Plan, base: SamplingParams) -> list[_Text]:
    """What the engine says to the shorter half of the prompts (the cheap half) when nothing stops it."""
    fitting = [one for one in subject.prompts if len(one.token_ids) + base.max_new_tokens <= subject.target.max_length]
    shorter = sorted(fitting, key=lambda one: len(one.token_ids))[: max(_PILOTS, len(fitting) // 2)]
    prompts = {prompt.id: prompt for prompt in spread(tuple(shorter), _PILOTS)}
    texts = []
    for trace in subject.engine.decode(asked("stopping/pilot", plan, prompts.values(), base)):
        unknown = [at % (plan.num_speculative_tokens + 1) - 1 for at in range(len(trace.token_ids))]
        places = tuple(places_of(trace.steps) or unknown)
        texts.append(_Text(prompts[trace.request.prompt_id], base, trace.token_ids, places))
    return texts


def _agreeable(subject: Subject, plan: Plan, texts: list[_Text], few: int) -> list[_Text]:
    """Texts of a few frequent ids, every other one banned."""
    frequent = Counter(token for text in texts for token in text.token_ids)
    allowed = {token for token, _ in frequent.most_common(few)}
    banned = tuple((token,) for token in range(subject.target.vocab_size) if token not in allowed)
    return _pilots(subject, plan, replace(_base(plan), banned_token_ids=banned))


def _reached(texts: list[_Text]) -> set[int]:
    return {text.places[at] for text in texts for at in text.first_uses()}


def rounds(subject: Subject, plan: Plan) -> Iterable[Round]:
    """The target-only texts, then the same prompts with stops at every offset."""
    plain = _pilots(subject, plan, _base(plan))
    detokenize = detokenizer(subject)
    places = {*range(plan.num_speculative_tokens), OWN}
    minimum = list(_minimum_lengths(plain, plan))
    wanted = [
        *_at_places(places, plain, plan, detokenize),
        *_two_in_a_block(plain, plan),
        *_limits(plain, plan),
        *minimum,
    ]
    texts = list(plain)
    for few in _FEW_IDS if plain and _can_ban(subject) else ():
        if not (missed := places - _reached(texts)):
            break
        agreeable = _agreeable(subject, plan, plain, few)
        wanted += _at_places(missed, agreeable, plan, detokenize)
        texts += agreeable
    if not wanted:
        return
    used = {reference_key(request) for request in wanted}
    references = (_ask(text, plan, "off", text.params, speculation=False) for text in texts)
    yield (
        *(request for request in references if reference_key(request) in used),
        *(replace(request, speculation=False) for request in minimum),
    )
    yield tuple(dict.fromkeys(wanted))


def _can_ban(subject: Subject) -> bool:
    return "banned_token_ids" in subject.engine.parameters


def _ask(text: _Text, plan: Plan, purpose: str, params: SamplingParams, *, speculation: bool = True) -> DecodeRequest:
    return asked(f"stopping/{purpose}", plan, (text.prompt,), params, speculation=speculation)[0]


def _at_places(
    places: Collection[int], texts: list[_Text], plan: Plan, detokenize: Detokenize | None
) -> Iterator[DecodeRequest]:
    """An EOS, a stop id and a stop string at each of these offsets of a block, in a few prompts each."""
    for place in sorted(places):
        there = ((text, at) for text in texts for at in text.first_uses() if text.places[at] == place)
        one_a_prompt = tuple({text.prompt.id: (text, at) for text, at in there}.values())
        for text, at in spread(one_a_prompt, _STOPS_PER_PLACE):
            base, token = text.params, text.token_ids[at]
            yield _ask(text, plan, f"eos@{at}", replace(base, eos_token_ids=(token,)))
            yield _ask(text, plan, f"stop@{at}", replace(base, stop_token_ids=(token,)))
            for stop in _stop_strings(text.token_ids, at, base, detokenize):
                yield _ask(text, plan, f"string@{at}", replace(base, stop_strings=(stop,)))


def _stop_strings(ids: tuple[int, ...], at: int, base: SamplingParams, detokenize: Detokenize | None) -> Iterator[str]:
    """The text of one token, and one that begins in the token before; those that are completed at `at`, not before."""
    if detokenize is None:
        return
    before, until = detokenize(ids[:at]), detokenize(ids[: at + 1])
    added = until[len(before) :]
    if not until.startswith(before) or not added or "\ufffd" in until:
        return
    straddling = before[-3:] + added[:2] if before else added
    for stop in dict.fromkeys((added, straddling)):
        if ended(ids, replace(base, stop_strings=(stop,)), detokenize).token_ids == ids[: at + 1]:
            yield stop


def _two_in_a_block(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """An EOS before a stop id, and the other way round, both among one block's drafts: the first decides."""
    base = _base(plan)
    pairs = (
        (text, at)
        for text in texts
        for at in text.first_uses()[:-1]
        if text.places[at] == 0 and at + 1 in text.first_uses()
    )
    for text, at in spread(tuple({text.prompt.id: (text, at) for text, at in pairs}.values()), _STOPS_PER_PLACE):
        first, second = ((token,) for token in text.token_ids[at : at + 2])
        yield _ask(text, plan, f"eos@{at},stop@{at + 1}", replace(base, eos_token_ids=first, stop_token_ids=second))
        yield _ask(text, plan, f"stop@{at},eos@{at + 1}", replace(base, eos_token_ids=second, stop_token_ids=first))


def _limits(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """Every length up to g + 3, without a stop, and with one just before, at and just after the limit."""
    least = plan.num_speculative_tokens + 3
    varied = sorted(texts, key=lambda text: -len([at for at in text.first_uses() if at <= least]))[:2]
    for text, kind in zip(varied, ("eos", "stop"), strict=False):
        for limit in spread(tuple(range(1, least + 1)), _MOST_LIMITS):
            short = replace(_base(plan), max_new_tokens=limit)
            yield _ask(text, plan, f"limit={limit}", short)
            for at in sorted({limit - 2, limit - 1, limit} & set(text.first_uses())):
                ids = (text.token_ids[at],)
                params = replace(short, eos_token_ids=ids) if kind == "eos" else replace(short, stop_token_ids=ids)
                yield _ask(text, plan, f"limit={limit},{kind}@{at}", params)


def _minimum_lengths(texts: list[_Text], plan: Plan) -> Iterator[DecodeRequest]:
    """An EOS that the text would say before, and exactly at, the least number of tokens."""
    for text in spread(tuple(text for text in texts if len(text.first_uses()) > 1), _STOPS_PER_PLACE):
        at = next(at for at in text.first_uses() if at > 0)
        for least in (at, at + 1, at + plan.num_speculative_tokens + 1):
            params = replace(_base(plan), eos_token_ids=(text.token_ids[at],), min_new_tokens=least)
            yield _ask(text, plan, f"min={least},eos@{at}", params)


def detokenizer(subject: Subject) -> Detokenize | None:
    """Ids to text, where the engine takes stop strings and the pair has a tokenizer."""
    if Capability.STOP_STRINGS not in subject.engine.capabilities:
        return None
    if subject.detokenize is not None:
        return subject.detokenize
    if subject.decoder is not None and subject.decoder.detokenize is not None:
        return subject.decoder.detokenize
    if subject.pair is None:
        return None
    tokenizer = subject.pair.target.tokenizer
    return lambda ids: str(tokenizer.decode(list(ids)))


def reference_key(request: DecodeRequest) -> tuple[object, ...]:
    """Which target-only text a request is held against: bans and a minimum length change the text, stops only cut it."""
    params = request.params
    changed = (params.min_new_tokens, params.eos_token_ids) if params.min_new_tokens else ()
    return (request.prompt_id, params.banned_token_ids, *changed)
