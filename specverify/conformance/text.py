"""Cells on an answer as text: streamed or whole, and held to a JSON schema."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from scipy.special import gammaln

from specverify.conformance.asking import Seen, cell
from specverify.conformance.told import counted, difference
from specverify.engines import Capability
from specverify.engines.schemas import SCHEMAS, texts_of
from specverify.errors import PlanError, SubjectError
from specverify.records import Finding, FinishReason, SamplingParams, StatisticalTest, Verdict
from specverify.statistics.budget import MOST_E_PROCESSES, e_threshold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.conformance.asking import Asking
    from specverify.engines import Telling, Told
    from specverify.records import DecodeCounters, DecodeRequest

__all__ = ["schema", "streams"]

_PROMPTS = 8
_SAMPLES_PER_SCHEMA = 128
_NEAR_TIE = 1e-3
"""Logits by which two greedy choices may differ and be taken for each other."""


def _telling(asking: Asking, capability: Capability, lacks: str) -> Telling:
    engine = asking.subject.engine
    if capability not in engine.capabilities:
        msg = f"{engine.name} {lacks}"
        raise PlanError(msg)
    return cast("Telling", engine)


# ------------------------------------------------------------------------------------------------------------ streams


def _requests(asking: Asking) -> Iterator[DecodeRequest]:
    """Greedy, sampled where a seed says again what it said, and with a stop string inside the text."""
    subject = asking.subject
    greedy = SamplingParams(temperature=0, max_new_tokens=13, eos_token_ids=subject.eos_token_ids)
    for prompt in subject.prompts[:_PROMPTS]:
        plain = asking.request(prompt.token_ids, greedy, name=f"greedy/{prompt.id}")
        yield plain
        if Capability.SEED in subject.engine.capabilities:
            yield asking.request(prompt.token_ids, replace(greedy, temperature=1), name=f"sampled/{prompt.id}")
        if Capability.STOP_STRINGS in subject.engine.capabilities and subject.detokenize is not None:
            (trace,) = asking.answers([plain])
            stop = subject.detokenize(trace.token_ids[2:4])
            if len(trace.token_ids) > 4 and stop:
                yield asking.request(prompt.token_ids, replace(greedy, stop_strings=(stop,)), name=f"stop/{prompt.id}")


def _look_at_streams(asking: Asking) -> Seen:
    engine = _telling(asking, Capability.STREAM, "streams nothing")
    wrong: list[Finding] = []
    notes: list[Finding] = []
    unstable = texts = tokens = several = 0
    for request in _requests(asking):
        try:
            whole = engine.tell(request)
        except SubjectError as error:
            if not request.params.stop_strings:
                raise
            text = f"a stop string breaks the engine without a stream, too, which is for stop_strings to say: {error}"
            notes.append(Finding(text=text, severity=Verdict.PASS, place=request.id))
            continue
        streamed = engine.tell(request, stream=True)
        texts, tokens = texts + 1, tokens + len(whole.token_ids)
        several += len(streamed.pieces) > 1
        differing = _differing(whole, streamed, text="".join(streamed.pieces))
        again = engine.tell(request) if differing else whole
        if _differing(whole, again, text=again.text):
            unstable += 1
        elif differing:
            wrong.append(Finding(text=differing, place=_place(request)))
        elif unlike := _unlike_its_ids(asking, request, whole):
            wrong.append(Finding(text=unlike, place=_place(request)))
    return Seen(
        summary=f"{texts} texts ({tokens:,} tokens) say streamed what they say whole, {several} of them in several pieces"
        + (f"; {unstable} say another thing each time" if unstable else ""),
        wrong=tuple(wrong),
        notes=tuple(notes),
        verdict=Verdict.INCONCLUSIVE if unstable or not several else Verdict.PASS,
        num_samples=texts,
        sample_unit="texts",
        smallest_detectable=1.0,
        effect_unit="texts that differ",
        advice="hand out every token of a step, in order, and none after the stop"
        if wrong
        else "find out why the same request with the same seed says another thing, or why a text comes in one piece",
    )


def _differing(whole: Told, other: Told, *, text: str) -> str:
    """In which way the second, whose user read `text`, is not the first."""
    for name, said, again in (
        ("the text", whole.text, text),
        ("the ids", list(whole.token_ids), list(other.token_ids)),
        ("the end", str(whole.finish), str(other.finish)),
    ):
        if said != again:
            return f"{name} is {said!r} whole and {again!r} streamed"
    return ""


def _unlike_its_ids(asking: Asking, request: DecodeRequest, whole: Told) -> str:
    """Whether a text that no stop string cut is that of its ids, with its EOS or without."""
    detokenize = asking.subject.detokenize
    if detokenize is None or request.params.stop_strings or not whole.token_ids:
        return ""
    kept = whole.token_ids[:-1] if whole.token_ids[-1] in request.params.eos_token_ids else whole.token_ids
    texts = [detokenize(whole.token_ids), detokenize(kept)]
    return "" if whole.text in texts else f"the text is {whole.text!r}, and its ids say {texts[-1]!r}"


def _place(request: DecodeRequest) -> str:
    return f"{request.id}, prompt {list(request.prompt_ids)}, seed {request.seed}"


# ------------------------------------------------------------------------------------------------------------- schema


def _look_at_schema(asking: Asking) -> Seen:
    engine = _telling(asking, Capability.SCHEMA, "takes no JSON schema")
    known, ambiguous = _spelling(asking)
    usual = SamplingParams(max_new_tokens=24, eos_token_ids=asking.subject.eos_token_ids)
    wrong: list[Finding] = []
    log_e: list[float] = []
    number, before = 0, counted(asking)
    for at, its in enumerate(SCHEMAS):
        texts = texts_of(its)
        tell = _teller(engine, its)
        for prompt in asking.subject.prompts[:4]:
            params = replace(usual, temperature=0)
            request = asking.request(prompt.token_ids, params, name=f"schema={at}/greedy/{prompt.id}")
            whole = tell(request, stream=False)
            number += 1
            wrong += _disobeying(asking, request, whole, its)
            if not wrong and not ambiguous:
                wrong += _unlikely(asking, request, whole, texts, known)
            if Capability.STREAM in asking.subject.engine.capabilities and (
                differing := _differing(whole, streamed := tell(request, stream=True), text="".join(streamed.pieces))
            ):
                wrong.append(Finding(text=f"under a schema {differing}", place=_place(request)))
        if ambiguous:
            continue
        prompt = asking.subject.prompts[at]
        said: list[str] = []
        for sample in range(_SAMPLES_PER_SCHEMA):
            request = asking.request(prompt.token_ids, usual, name=f"schema={at}/sampled/{sample}")
            whole = tell(request, stream=False)
            wrong += _disobeying(asking, request, whole, its)
            said.append(whole.text.removesuffix(_eos_text(asking)))
        number += len(said)
        law = [_chance(asking, prompt.token_ids, text, texts, known) for text in texts]
        log_e.append(_log10_e([said.count(text) for text in texts], law))
        if wrong:
            break
    if ambiguous and not wrong:
        msg = f"{number} texts obey their schemas, but the law of a text isn't known: {ambiguous}"
        raise PlanError(msg)
    test = StatisticalTest(
        name="texts under a schema follow the target's law, masked",
        statistic=max(log_e, default=0.0),
        log10_e=_mean_log10(log_e or [0.0]),
        allowed=float("nan"),
        failed=False,
        num_samples=number,
        smallest_detectable=_smallest(len(texts_of(SCHEMAS[1])), _SAMPLES_PER_SCHEMA, asking.plan.false_fail_rate),
    )
    drafted = difference(before, cast("DecodeCounters", counted(asking))).num_draft_tokens if before else None
    return Seen(
        summary="nothing was drafted under a schema, so nothing was shown"
        if drafted == 0
        else f"{number} texts under {len(SCHEMAS)} schemas obey them, and are as frequent as the target's masked law says",
        wrong=tuple(wrong),
        tests=() if wrong else (test,),
        measurements={} if drafted is None else {"num_draft_tokens": drafted},
        verdict=Verdict.INCONCLUSIVE if drafted == 0 else Verdict.PASS,
        num_samples=number,
        sample_unit="texts",
        smallest_detectable=test.smallest_detectable,
        effect_unit="TV distance",
        advice="apply the grammar's mask to every row of a block, the bonus row too, before a token is drawn from it",
    )


def _teller(engine: Telling, its: dict[str, Any]) -> Callable[..., Told]:
    text = json.dumps(its)
    return lambda request, *, stream: engine.tell(request, stream=stream, schema=text)


def _spelling(asking: Asking) -> tuple[dict[str, int], str]:
    """The token of each character, and why a text of the schemas may be spelt in another way than by those, if it may.

    Its law would be a sum over all the ways, and what is cut of a half-spelt one is each grammar's own.
    """
    detokenize, eos = asking.subject.detokenize, asking.subject.eos_token_ids
    told = {token: detokenize([token]) for token in range(asking.subject.target.vocab_size)} if detokenize else {}
    texts = [text for its in SCHEMAS for text in texts_of(its)]
    characters = {character for text in texts for character in text}
    known: dict[str, int] = {}
    for token, said in told.items():
        if token in eos or not said:
            continue
        bare = said.strip()  # JSON may have spaces between its parts
        several = len(said) > 1 and any(bare in text for text in texts)
        if not bare or several or (said in characters and said in known):
            return known, f"the target's tokenizer has the token {said!r} beside those of single characters"
        known[said] = token
    lacking = sorted(characters - set(known))
    return known, f"the target's tokenizer has no token for {lacking[0]!r}" if lacking else ""


def _eos_text(asking: Asking) -> str:
    """Some servers hand it out."""
    return asking.subject.detokenize(asking.subject.eos_token_ids[:1]) if asking.subject.detokenize is not None else ""


def _disobeying(asking: Asking, request: DecodeRequest, whole: Told, its: dict[str, Any]) -> list[Finding]:
    text = whole.text.removesuffix(_eos_text(asking))
    with contextlib.suppress(ValueError):
        if json.loads(text) in map(json.loads, texts_of(its)) and whole.finish is not FinishReason.LENGTH:
            return []
    said = f"{text!r} ends as '{whole.finish}'"
    return [Finding(text=f"under the schema {json.dumps(its)} the text {said}", place=_place(request))]


def _choices(text: str, texts: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    """Each prefix of a text with all that may follow it, the empty string where it may end."""
    for place in range(len(text) + 1):
        begun = text[:place]
        yield begun, {each[place : place + 1] for each in texts if each.startswith(begun)}


@torch.inference_mode()
def _masked(asking: Asking, prompt_ids: Sequence[int], begun: str, follows: set[str], known: dict[str, int]) -> Any:  # noqa: ANN401 - a dict
    """Log-probability of each allowed next character, the target's law among them alone."""
    ids = {each: known[each] if each else asking.subject.eos_token_ids[0] for each in sorted(follows)}
    row = asking.subject.target.logits([(*prompt_ids, *(known[character] for character in begun))])[0, -1]
    law = torch.log_softmax(row[list(ids.values())].double(), -1)
    return dict(zip(ids, law.tolist(), strict=True))


def _chance(asking: Asking, prompt_ids: Sequence[int], text: str, texts: Sequence[str], known: dict[str, int]) -> float:
    """Log-probability of a whole text under the masked law."""
    total = 0.0
    for begun, follows in _choices(text, texts):
        total += _masked(asking, prompt_ids, begun, follows, known)[text[len(begun) : len(begun) + 1]]
    return total


def _unlikely(
    asking: Asking, request: DecodeRequest, whole: Told, texts: Sequence[str], known: dict[str, int]
) -> list[Finding]:
    """A greedy text that leaves the likeliest allowed character."""
    text = whole.text.removesuffix(_eos_text(asking))
    for begun, follows in _choices(text, texts):
        law = _masked(asking, request.prompt_ids, begun, follows, known)
        took = text[len(begun) : len(begun) + 1]
        if max(law.values()) - law[took] > _NEAR_TIE:
            likeliest = max(law, key=law.__getitem__)
            text = f"at temperature 0, {took!r} follows {begun!r}, though {likeliest!r} is allowed and likelier"
            return [Finding(text=text, place=_place(request))]
    return []


def _log10_e(counts: Sequence[int], log_law: Sequence[float]) -> float:
    """Of a bet on all other laws at once (Dirichlet's, with 1/2), against this one: a likelihood ratio, so an e-value."""
    cells, number = len(counts), sum(counts)
    bet = gammaln(cells / 2) - gammaln(number + cells / 2)
    bet += sum(gammaln(count + 0.5) - gammaln(0.5) for count in counts)
    law = sum(count * log for count, log in zip(counts, log_law, strict=True))
    return float(bet - law) / math.log(10)


def _mean_log10(values: Sequence[float]) -> float:
    """The mean of e-values is one."""
    most = max(values)
    return most + math.log10(sum(10 ** (value - most) for value in values) / len(values))


def _smallest(cells: int, number: int, rate: float) -> float:
    """By Pinsker: a TV distance d earns 2 d² nats a text on average.

    Of these the bet costs at most half a log of their number for each cell but one, and a log of the cells; the
    mean over the schemas a log of theirs; and proof is what an e-process of a run needs.
    """
    proof = e_threshold(rate / 2, MOST_E_PROCESSES) * math.log(10)
    needed = proof + math.log(len(SCHEMAS)) + (cells - 1) / 2 * math.log(number) + math.log(cells)
    return min(1.0, math.sqrt(needed / (2 * number)))


streams = cell("streams", "an answer says streamed what it says whole", _look_at_streams)
"""Text, ids and end; greedy, sampled, and with a stop string inside a block."""
schema = cell("schema", "under a JSON schema every text obeys it, and follows the target's masked law", _look_at_schema)
"""Ignored without a word is a FAIL; refused is NOT_RUN."""
