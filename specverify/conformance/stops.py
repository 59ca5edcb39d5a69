"""The stopping check in two cells: an engine that breaks at stop strings may still end well at ids and lengths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specverify.checks.check import Check, asked, reproduce
from specverify.checks.stop_requests import detokenizer, ended
from specverify.checks.stopping import stopping
from specverify.errors import PlanError
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


def _rounds(subject: Subject, plan: Plan, *, strings: bool) -> Iterable[Round]:
    """Target-only texts, and the requests of one kind. Raises `PlanError` where there is no text to stop at."""
    if strings and detokenizer(subject) is None:
        msg = f"{subject.engine.name} takes no stop strings"
        raise PlanError(msg)
    for each in stopping.rounds(subject, plan):
        kept = tuple(one for one in each if not one.speculation or bool(one.params.stop_strings) is strings)
        if kept:
            yield kept
    if "banned_token_ids" in subject.engine.parameters:
        yield from _repeating(subject, plan, strings=strings)


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
