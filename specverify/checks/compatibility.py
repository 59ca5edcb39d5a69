"""compatibility: draft and target mean the same token by the same id. Compares tokenizers and configurations.

Note [Severity]: a correct decoder verifies every draft with the target, so nothing about a draft can change a text. But
engines hand ids from one model to the other, and that is right only while an id is the same token to both. So:
FAIL  an id that can be emitted is another token to the draft, or can't be read by it; or where a text ends depends on
      whose configuration is read.
PASS  worth knowing: it costs acceptance, or an engine may refuse it (padding, template, BOS, positions, size).
"""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import TYPE_CHECKING

from specverify.checks.check import Check, reproduce
from specverify.checks.ids import DifferingId, compare_ids, eos_ids, shown, stated_eos, token_strings, translation
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, Verdict, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from specverify.models.loading import LoadedModel
    from specverify.plan import Plan
    from specverify.scoring import ScoredTraces
    from specverify.subject import Subject

__all__ = ["PROVOKING_TEXTS", "DifferingId", "compare_ids", "compatibility", "eos_ids", "token_strings"]

_MOST_NAMED = 5
_MOST_POINTS = 200
"""Of a plotted series; of more differing ids, evenly many."""
PROVOKING_TEXTS = (
    "Hello, world!", " leading", "trailing ", "a  b   c    d", "\tTab\tbed", "one\ntwo\n\n\n", "dos\r\nline\r\n",
    "1234567890 3.14159 1,000,000 0x1F", "don't DON'T I'll we'VE", "ALLCAPS camelCase snake_case", "a" * 40,
    "e\u0301 \u00e9 \u00c5 A\u030a", "\ufb01ne \uff21\uff22\uff23 \u2460", "non\u00a0breaking\u2009thin\u3000wide",
    "zero\u200bwidth\ufeff", "\u4f60\u597d\uff0c\u4e16\u754c", "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "def f(x):\n    return {'a': x[0]}  # no\n", "https://example.org/a?b=c&d=%20#e", "<s></s><unk><pad>[CLS][SEP]",
    "\u2581under\u2581score", "\x00\x1b\x7f", "!!!???...\u2026---\u2014",
)  # fmt: skip
"""Texts on which normalisers, pre-tokenizers and merges that differ are likely to disagree."""


# ---------------------------------------------------------------------------------------------- ids


def _token(tokens: Mapping[int, str], number: int | None) -> str:
    return "none" if number is None else f"{number} ({shown(tokens.get(number))})"


def _named(items: Sequence[object]) -> str:
    rest = len(items) - _MOST_NAMED
    return "; ".join(map(str, items[:_MOST_NAMED])) + (f"; and {rest:,} more" if rest > 0 else "")


def _note(text: str, place: str) -> Finding:
    return Finding(text=text, severity=Verdict.PASS, place=place)


# ---------------------------------------------------------------------------------------------- one model, and two


def _output_size(loaded: LoadedModel, role: str) -> Iterator[Finding]:
    """Rows of the output layer against ids of the tokenizer: more rows are padding, fewer leave tokens unsayable."""
    tokens, rows = token_strings(loaded.tokenizer), loaded.model.vocab_size
    size = max(tokens, default=-1) + 1
    place = f"output size of the {role}"
    if rows > size:
        text = f"{rows:,} output rows for {size:,} ids: ids {size} to {rows - 1} are padding, which no text holds"
        yield _note(text, place)
    beyond = [number for number in sorted(tokens) if number >= rows]
    if not beyond:
        return
    named = _named([_token(tokens, number) for number in beyond])
    if set(beyond) <= set(loaded.tokenizer.all_special_ids):
        yield _note(f"special tokens without an output row: {named}; a text can't hold them", place)
    else:
        yield Finding(text=f"{len(beyond):,} ids of the tokenizer have no output row: {named}", place=place)


def _own_eos(loaded: LoadedModel, role: str) -> Iterator[Finding]:
    """Whoever reads the tokenizer must stop where whoever reads the generation config stops."""
    tokens, stated, own = token_strings(loaded.tokenizer), stated_eos(loaded), loaded.tokenizer.eos_token_id
    place = f"EOS of the {role}"
    severity = Verdict.FAIL if role == "target" else Verdict.PASS
    if own is None and not stated:
        yield _note("neither tokenizer nor generation config names an EOS: texts end at their limit only", place)
    elif own is not None and int(own) not in stated:
        names = f"only {', '.join(_token(tokens, number) for number in stated)}" if stated else "no EOS"
        text = (
            f"the tokenizer's EOS is {_token(tokens, int(own))}, but the generation config names {names}: "
            "where a text ends depends on which of them an engine reads"
        )
        yield Finding(text=text, severity=severity, place=place)


def _ids(target: LoadedModel, draft: LoadedModel, differing: tuple[DifferingId, ...]) -> Iterator[Finding]:
    emittable = [each for each in differing if each.emittable]
    if emittable:
        text = (
            f"{len(emittable):,} ids that can be emitted are another token to the draft: {_named(emittable)}; "
            "an engine that hands ids over as they are drafts another text than the draft meant"
        )
        yield Finding(text=text, place=f"id {emittable[0].id}")
    tokens, readable = token_strings(target.tokenizer), draft.model.num_embeddings
    unread = [number for number in sorted(tokens) if readable <= number < target.model.vocab_size]
    if unread:
        text = (
            f"{len(unread):,} ids that the target can emit have no embedding in the draft ({readable:,} rows): "
            f"{_named([_token(tokens, number) for number in unread])}; handing one over breaks, or reads out of bounds"
        )
        yield Finding(text=text, place=f"id {unread[0]}")
    rows = target.model.vocab_size
    unverified = [each for each in differing if each.draft is not None and rows <= each.id < draft.model.vocab_size]
    if unverified:
        text = (
            f"{len(unverified):,} ids that the draft can emit are beyond the target's {rows:,} output rows: "
            f"{_named(unverified)}; looking up the target's probability there reads out of bounds"
        )
        yield Finding(text=text, place=f"id {unverified[0].id}")
    rest = [each for each in differing if each.id not in {e.id for e in (*emittable, *unverified)} | set(unread)]
    if rest:
        text = f"{len(rest):,} ids differ that not both emit in a text, which costs acceptance at most: {_named(rest)}"
        yield _note(text, f"id {rest[0].id}")


def _special_tokens(target: LoadedModel, draft: LoadedModel) -> Iterator[Finding]:
    ours, theirs = token_strings(target.tokenizer), token_strings(draft.tokenizer)
    for role in ("bos", "eos", "pad", "unk"):
        one, other = (getattr(loaded.tokenizer, f"{role}_token_id") for loaded in (target, draft))
        if one != other:
            names = f"{_token(ours, one)} to the target and {_token(theirs, other)} to the draft"
            yield _note(f"it is {names}, which costs acceptance at most", f"{role.upper()} token")
    added, others = (set(loaded.tokenizer.get_added_vocab().items()) for loaded in (target, draft))
    if added != others:
        one_sided = [
            f"{_token({number: token}, number)} in the {role} only"
            for role, items in (("target", added - others), ("draft", others - added))
            for token, number in sorted(items, key=lambda item: item[1])
        ]
        yield _note(f"added tokens differ: {_named(one_sided)}", "added tokens")


def _eos(target: LoadedModel, draft: LoadedModel) -> Iterator[Finding]:
    """An id that ends a text for the draft alone may cut one; one that ends it for the target alone costs drafts."""
    ours, theirs = set(eos_ids(target)), set(eos_ids(draft))
    if alone := sorted(theirs - ours):
        tokens = token_strings(draft.tokenizer)
        text = (
            f"{', '.join(_token(tokens, number) for number in alone)} ends a text for the draft, but not for the "
            "target: an engine that stops on the draft's EOS cuts texts short"
        )
        yield Finding(text=text, place="EOS ids")
    if missed := sorted(ours - theirs):
        tokens = token_strings(target.tokenizer)
        named = ", ".join(_token(tokens, number) for number in missed)
        yield _note(
            f"{named} ends a text for the target, but not for the draft: drafts after it are dropped", "EOS ids"
        )


def _templates(target: LoadedModel, draft: LoadedModel) -> Iterator[Finding]:
    one, other = (getattr(loaded.tokenizer, "chat_template", None) for loaded in (target, draft))
    if one == other:
        return
    if one is None or other is None:
        text = f"only the {'target' if other is None else 'draft'} has a chat template"
    else:
        shared = len(commonprefix([str(one), str(other)]))  # noqa: RUF071 - of characters, not of a path
        text = f"the chat templates differ, from character {shared} on"
    text += "; prompts must be rendered with the target's, and a draft trained on another layout is accepted less"
    yield _note(text, "chat template")


def _sizes(target: LoadedModel, draft: LoadedModel, longest: int) -> Iterator[Finding]:
    """Output rows, positions and parameters."""
    ours, theirs = target.model, draft.model
    if ours.vocab_size != theirs.vocab_size:
        counts = f"the target has {ours.vocab_size:,} output rows and the draft {theirs.vocab_size:,}"
        yield _note(f"{counts}; some engines refuse unequal sizes", "output sizes")
    if theirs.max_length < ours.max_length:
        reach = "which this run reaches" if longest > theirs.max_length else f"beyond this run's {longest:,} tokens"
        counts = f"the target has {ours.max_length:,} positions and the draft {theirs.max_length:,}"
        yield _note(f"{counts}: drafting must stop there, {reach}", "maximum positions")
    if theirs.num_parameters >= ours.num_parameters:
        size = "larger than" if theirs.num_parameters > ours.num_parameters else "as large as"
        counts = f"{theirs.num_parameters:,} against {ours.num_parameters:,} parameters"
        yield _note(f"the draft is {size} the target ({counts}): were they swapped?", "parameters")


def _encoding(target: LoadedModel, draft: LoadedModel) -> Iterator[Finding]:
    """Normalisers, pre-tokenizers and merges by what they do; then what is put around a text."""
    one, other = target.tokenizer, draft.tokenizer
    otherwise = []
    for tried in (*PROVOKING_TEXTS, *sorted(one.get_added_vocab())[:10]):
        left, right = (list(each.encode(tried, add_special_tokens=False)) for each in (one, other))
        if left != right:
            otherwise.append(f"{shown(tried)} gives {_some(left)} by the target's and {_some(right)} by the draft's")
    if otherwise:
        text = f"{len(otherwise)} of the tried texts are encoded otherwise, which costs acceptance: {_named(otherwise)}"
        yield _note(text, "encoding")
    if _around(one) != _around(other):
        text = f"the target's tokenizer puts {_around(one)} around a text and the draft's {_around(other)}"
        yield _note(f"{text}; prompts must be encoded once, with the target's", "BOS insertion")


def _decoding(target: LoadedModel, draft: LoadedModel) -> Iterator[Finding]:
    """The same ids must read as the same text; asked only where the token strings agree, which says more."""
    for tried in PROVOKING_TEXTS:
        ids = target.tokenizer.encode(tried, add_special_tokens=False)
        one, other = (
            str(each.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for each in (target, draft)
        )
        if one != other:
            text = f"ids {_some(ids)} read {shown(one)} with the target's tokenizer and {shown(other)} with the draft's"
            yield Finding(text=text, place="decoding")
            return


def _some(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"{str(ids[:8])[:-1]}, …]"


def _around(tokenizer: PreTrainedTokenizerBase) -> str:
    """The ids that encoding adds before and after a text."""
    bare, full = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    starts = range(len(full) - len(bare) + 1)
    start = next((place for place in starts if full[place : place + len(bare)] == bare), 0)
    before, after = full[:start], full[start + len(bare) :]
    return f"{_some(before)} and {_some(after)}" if before or after else "nothing"


# ---------------------------------------------------------------------------------------------- the check


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    del scored
    if subject.pair is None:
        return CheckResult(
            id=compatibility.id,
            claim=compatibility.claim,
            verdict=Verdict.NOT_RUN,
            summary="the models did not come from folders, so there is no tokenizer to compare",
        )
    target, draft = subject.pair.target, subject.pair.draft
    findings = [*_output_size(target, "target"), *_own_eos(target, "target")]
    differing: tuple[DifferingId, ...] = ()
    handed_over = translation(subject)
    findings += handed_over
    if draft is not None and not handed_over:
        differing = compare_ids(target, draft)
        longest = max((len(prompt.token_ids) for prompt in subject.prompts), default=0) + plan.max_new_tokens
        findings += _of_both(target, draft, differing, longest=longest)
    findings.sort(key=lambda found: found.severity is not Verdict.FAIL)
    verdict = worst([Verdict.PASS, *(found.severity for found in findings)])
    num_ids = len(token_strings(target.tokenizer).keys() | (token_strings(draft.tokenizer).keys() if draft else set()))
    return CheckResult(
        id=compatibility.id,
        claim=compatibility.claim,
        verdict=verdict,
        summary=_summary(findings, num_ids, num_differing=len(differing), alone=draft is None or bool(handed_over)),
        findings=tuple(findings),
        measurements=_measurements(target, draft, differing),
        num_samples=num_ids,
        sample_unit="ids",
        advice=_advice(findings) if verdict is Verdict.FAIL else "",
        reproduce=reproduce(subject, plan, compatibility.id),
        plots=() if draft is None or handed_over else (_plot(differing, num_ids),),
    )


def _plot(differing: Sequence[DifferingId], num_ids: int) -> Plot:
    """Where they lie: a few added tokens at the end, or everything from one id on."""

    def counted(label: str, ids: Sequence[int]) -> Series:
        every = max(1, -(-len(ids) // _MOST_POINTS))
        known = [(float(number), float(place)) for place, number in list(enumerate(ids, 1))[::every]]
        x, y = zip((0.0, 0.0), *known, (float(max(num_ids, *ids, 0)), float(len(ids))), strict=True)
        return Series(label=label, x=x, y=y)

    return Plot(
        id="compatibility/ids",
        title="Ids that are not the same token to both, counted from id 0",
        x_label="id",
        y_label="ids that differ so far",
        kind=PlotKind.STEP,
        series=(
            counted("all", [each.id for each in differing]),
            counted("can be emitted", [each.id for each in differing if each.emittable]),
        ),
        caption="Flat at zero: one vocabulary. A step at the end: added tokens. A rise without an end: everything is shifted from there on.",
    )


def _of_both(
    target: LoadedModel, draft: LoadedModel, differing: tuple[DifferingId, ...], *, longest: int
) -> list[Finding]:
    return [
        *_ids(target, draft, differing),
        *(() if any(each.emittable for each in differing) else _decoding(target, draft)),
        *_output_size(draft, "draft"),
        *_eos(target, draft),
        *_own_eos(draft, "draft"),
        *_special_tokens(target, draft),
        *_templates(target, draft),
        *_encoding(target, draft),
        *_sizes(target, draft, longest),
    ]


def _summary(findings: list[Finding], num_ids: int, *, num_differing: int, alone: bool) -> str:
    broken = [found for found in findings if found.severity is Verdict.FAIL]
    if broken:
        return f"{broken[0].place}: {broken[0].text}" + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else "")
    notes = f"; {len(findings)} worth knowing" if findings else ""
    if alone:
        return f"no draft's ids are taken as they are; {num_ids:,} ids of the target's tokenizer fit its output layer{notes}"
    return (
        f"{num_ids:,} ids compared, {f'{num_differing:,} differ' if num_differing else 'all the same to both'}{notes}"
    )


def _measurements(
    target: LoadedModel, draft: LoadedModel | None, differing: tuple[DifferingId, ...]
) -> dict[str, float | int | str]:
    figures: dict[str, float | int | str] = {}
    for role, loaded in (("target", target), ("draft", draft)):
        if loaded is not None:
            size = max(token_strings(loaded.tokenizer), default=-1) + 1
            figures |= {
                f"{role}_tokenizer_size": size,
                f"{role}_output_size": loaded.model.vocab_size,
                f"{role}_padding_rows": max(loaded.model.vocab_size - size, 0),
                f"{role}_max_positions": loaded.model.max_length,
                f"{role}_num_parameters": loaded.model.num_parameters,
                f"{role}_eos_ids": " ".join(map(str, eos_ids(loaded))) or "none",
            }
    if draft is not None:
        figures["num_differing_ids"] = len(differing)
        figures["num_emittable_differing_ids"] = sum(each.emittable for each in differing)
    return figures


def _advice(findings: list[Finding]) -> str:
    places = " ".join(found.place for found in findings if found.severity is Verdict.FAIL)
    advice = []
    if re.search(r"\bid \d|output size|decoding", places):
        advice.append("use a draft that was trained with the target's own tokenizer files, or copy them over if it was")
    if "EOS of the" in places:
        advice.append("name the tokenizer's EOS among eos_token_id in the target's generation_config.json")
    if "EOS ids" in places:
        advice.append("give the draft's generation_config.json the target's eos_token_id")
    return "; ".join(advice)


compatibility = Check(
    id="compatibility",
    claim="draft and target mean the same token by the same id",
    conclude=_conclude,
)
"""Exact: every id is compared, so there is no sample and no error budget."""
