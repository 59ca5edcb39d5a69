"""The stopping check in two cells: an engine that breaks at stop strings may still end well at ids and lengths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specverify.checks.check import Check, asked, reproduce
from specverify.checks.stop_requests import detokenizer, ended
from specverify.checks.stopping import stopping
from specverify.errors import PlanError, UsageError
from specverify.records import SamplingParams
from specverify.subject import EncodedPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from specverify.checks.check import Round
    from specverify.checks.stop_requests import Detokenize
    from specverify.plan import Plan
    from specverify.records import CheckResult, DecodeRequest
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["stop_strings", "stops"]

_REPEATING = 8
"""Texts of two ids."""
_NARROW, _SEARCHED, _LENGTH, _OWN_EOS_LENGTH, _PROMPTS_PER_PLACE = 256, 512, 6, 14, 3
"""Where a text that ends by itself is looked for: ids at most, prompts and their tokens; tokens of a text, prompts kept."""


def _rounds(subject: Subject, plan: Plan, *, strings: bool) -> Iterable[Round]:
    """Target-only texts, and the requests of one kind. Raises `PlanError` where there is no text to stop at."""
    if strings and detokenizer(subject) is None:
        msg = f"{subject.engine.name} takes no stop strings"
        raise PlanError(msg)
    own_alone = _takes_its_own_eos_alone(subject, plan)
    if own_alone and not strings:
        yield from _own_eos(subject, plan)
        return
    for each in stopping.rounds(subject, plan):
        kept = tuple(one for one in each if not one.speculation or bool(one.params.stop_strings) is strings)
        if own_alone:  # it ends a text there, asked or not
            kept = tuple(_with_eos(one, subject.eos_token_ids) for one in kept)
        if kept:
            yield kept
    if "banned_token_ids" in subject.engine.parameters:
        yield from _repeating(subject, plan, strings=strings)


def _takes_its_own_eos_alone(subject: Subject, plan: Plan) -> bool:
    """Whether another id is refused aloud as an EOS, as llama.cpp does: the model's own then has to show it all."""
    if "eos_token_ids" not in subject.engine.parameters:
        return True
    other = next(token for token in range(subject.target.vocab_size) if token not in subject.eos_token_ids)
    params = SamplingParams(temperature=0, max_new_tokens=1, eos_token_ids=(other,))
    try:
        list(subject.engine.decode(asked("stopping/refused", plan, subject.prompts[:1], params)))
    except UsageError:
        return True
    return False


def _with_eos(request: DecodeRequest, eos_token_ids: tuple[int, ...]) -> DecodeRequest:
    return replace(request, params=replace(request.params, eos_token_ids=eos_token_ids))


def _own_eos(subject: Subject, plan: Plan) -> Iterable[Round]:
    """Prompts after which the target's own EOS falls at each place of a text; limits around it, and none.

    Raises `PlanError` for a vocabulary in which no search finds them.
    """
    if not subject.eos_token_ids or subject.target.vocab_size > _NARROW:
        msg = f"{subject.engine.name} ends a text at the model's own EOS alone, and no prompt is known that leads to it"
        raise PlanError(msg)
    base = SamplingParams(temperature=0, max_new_tokens=_OWN_EOS_LENGTH, eos_token_ids=subject.eos_token_ids)
    ending = _prompts_that_end(subject, plan, base)
    references = [asked("stopping/off", plan, (prompt,), base, speculation=False)[0] for _, prompt in ending]
    wanted: list[DecodeRequest] = []
    for at, prompt in ending:
        wanted += asked(f"stopping/own eos@{at}", plan, (prompt,), base)
        for limit in range(max(1, at), min(at + 2, _OWN_EOS_LENGTH) + 1):
            short = replace(base, max_new_tokens=limit)
            wanted += asked(f"stopping/limit={limit},own eos@{at}", plan, (prompt,), short)
    yield tuple(references)
    yield tuple(wanted)


def _prompts_that_end(subject: Subject, plan: Plan, base: SamplingParams) -> list[tuple[int, EncodedPrompt]]:
    """A few prompts for each place at which the greedy text of the target ends, with that place."""
    random = np.random.default_rng(plan.seed)
    ordinary = [token for token in range(subject.target.vocab_size) if token not in subject.eos_token_ids]
    texts = [[ordinary[int(at)] for at in row] for row in random.integers(len(ordinary), size=(_SEARCHED, _LENGTH))]
    found: dict[int, list[EncodedPrompt]] = {at: [] for at in range(base.max_new_tokens)}
    for at in range(base.max_new_tokens):
        chosen = subject.target.logits(texts)[:, -1].argmax(-1).tolist() if texts else []
        going = []
        for text, token in zip(texts, chosen, strict=True):
            if token not in subject.eos_token_ids:
                going.append([*text, token])
            elif len(found[at]) < _PROMPTS_PER_PLACE:
                name = f"ends@{at},{len(found[at])}"
                found[at].append(EncodedPrompt(id=name, domain="ending", token_ids=tuple(text[:_LENGTH])))
        texts = going
    return [(at, prompt) for at, prompts in found.items() for prompt in prompts]


def _repeating(subject: Subject, plan: Plan, *, strings: bool) -> Iterable[Round]:
    """Texts of two ids after prompts of the same two: what drafts from the text itself drafts there, and is accepted.

    So ends fall inside the blocks of a look-up, too: an id that the text has not said before, or three characters in a row.
    """
    references: list[DecodeRequest] = []
    wanted: list[DecodeRequest] = []
    ordinary = [token for token in range(subject.target.vocab_size) if token not in subject.eos_token_ids]
    for number in range(_REPEATING):
        pair = (ordinary[number], ordinary[-1 - number])
        ids = tuple(pair[(place * (number + 2) + place // 3) % 2] for place in range(10))
        prompt = EncodedPrompt(id=f"repeating{number}", domain="repeating", token_ids=ids)
        banned = tuple((token,) for token in range(subject.target.vocab_size) if token not in pair)
        base = SamplingParams(temperature=0, max_new_tokens=14, banned_token_ids=banned)
        (reference,) = asked("stopping/off", plan, (prompt,), base, speculation=False)
        (text,) = (trace.token_ids for trace in subject.engine.decode([reference]))
        references.append(reference)
        for purpose, params in _ends(ids, text, base, detokenizer(subject) if strings else None):
            wanted += asked(f"stopping/{purpose}", plan, (prompt,), params)
    yield tuple(references)
    yield tuple(wanted)


def _ends(
    prompt_ids: tuple[int, ...], text: tuple[int, ...], base: SamplingParams, detokenize: Detokenize | None
) -> Iterator[tuple[str, SamplingParams]]:
    """Ends that fall at each place of a text and nowhere before, not even in what begins in the prompt.

    Whether a stop string may begin there is for each engine to say (transformers: yes; most servers: no).
    """
    for at in range(0 if detokenize is None else 2, len(text)):
        if detokenize is None:
            if text[at] not in text[:at]:
                yield f"eos@{at}", replace(base, eos_token_ids=(text[at],))
                yield f"stop@{at}", replace(base, stop_token_ids=(text[at],))
            continue
        stop = detokenize(text[at - 2 : at + 1])
        tail = detokenize(prompt_ids)[1 - len(stop) :] if len(stop) > 1 else ""
        if (
            stop
            and stop not in tail + detokenize(text[:at])
            and ended(text, replace(base, stop_strings=(stop,)), detokenize).token_ids == text[: at + 1]
        ):
            yield f"string@{at}", replace(base, stop_strings=(stop,))


def _conclude(check_id: str, claim: str, subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    found = stopping.conclude(subject, plan, scored)
    return replace(found, id=check_id, claim=claim, reproduce=reproduce(subject, plan, check_id))


def _cell(check_id: str, claim: str, *, strings: bool) -> Check:
    return Check(
        id=check_id,
        claim=claim,
        rounds=partial(_rounds, strings=strings),
        conclude=partial(_conclude, check_id, claim),
    )


stops = _cell(
    "stopping", "a text ends at its first EOS, stop id or limit, whatever the offset in a block", strings=False
)
stop_strings = _cell(
    "stop_strings",
    "a text ends with the token that completes a stop string, whatever the offset in a block",
    strings=True,
)
