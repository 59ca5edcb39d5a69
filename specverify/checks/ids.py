"""What each id is: to one tokenizer, to two, and to a draft whose ids are handed over as others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.drafting import TextDraft
from specverify.errors import PairError
from specverify.models.translated import TranslatedModel
from specverify.records import Finding, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specverify.models.loading import LoadedModel
    from specverify.subject import Subject

__all__ = ["DifferingId", "compare_ids", "eos_ids", "shown", "stated_eos", "token_strings", "translation"]

_RESERVED = re.compile(r"[<\[].*(unused|reserved|dummy|placeholder|extra)[^>\]]*[>\]]", re.IGNORECASE)
"""Names of tokens that are kept free and that no text holds, such as `<|reserved_special_token_5|>` and `[unused7]`."""


@dataclass(frozen=True, kw_only=True)
class DifferingId:
    """An id that is not the same token to both; None is an id that the tokenizer doesn't have."""

    id: int
    target: str | None
    draft: str | None
    emittable: bool
    """Both models can emit it, and to both it is a token that texts hold."""

    def __str__(self) -> str:
        """As findings name it."""
        return f"id {self.id} is {shown(self.target)} to the target and {shown(self.draft)} to the draft"


def token_strings(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The token of every id, added ones included."""
    return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}


def compare_ids(target: LoadedModel, draft: LoadedModel) -> tuple[DifferingId, ...]:
    """Every id that is not the same token to both, by id; `compatibility` and the command line judge them."""
    ours, theirs = token_strings(target.tokenizer), token_strings(draft.tokenizer)
    rows = min(target.model.vocab_size, draft.model.vocab_size)
    return tuple(
        DifferingId(
            id=number,
            target=ours.get(number),
            draft=theirs.get(number),
            emittable=number < rows and _is_text(ours.get(number)) and _is_text(theirs.get(number)),
        )
        for number in sorted(ours.keys() | theirs.keys())
        if ours.get(number) != theirs.get(number)
    )


def eos_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, or the tokenizer's where that names none."""
    own = loaded.tokenizer.eos_token_id
    return stated_eos(loaded) or (() if own is None else (int(own),))


def stated_eos(loaded: LoadedModel) -> tuple[int, ...]:
    """Those that the generation config names; raises `PairError` for what is no id."""
    stated = getattr(loaded.generation_config, "eos_token_id", None)
    if stated is None:
        return ()
    try:
        return tuple(sorted({int(number) for number in (stated if isinstance(stated, (list, tuple)) else [stated])}))
    except (TypeError, ValueError) as error:
        msg = f"generation_config.json of {loaded.source} sets eos_token_id to {stated!r:.80}, which is no id; mend it"
        raise PairError(msg) from error


def _is_text(token: str | None) -> bool:
    return token is not None and not _RESERVED.fullmatch(token)


def shown(token: str | None) -> str:
    """As findings name a token."""
    return "no token" if token is None else repr(token if len(token) <= 40 else token[:39] + "…")


def translation(subject: Subject) -> list[Finding]:
    """What is drafted where the draft's ids are not handed over as they are; nothing where they are."""
    place = "two vocabularies"
    if isinstance(subject.draft, TranslatedModel):
        ids = subject.draft.target_ids
        shared, of = int((ids >= 0).sum()), subject.draft.vocab_size
        text = (
            f"{shared:,} of the target's {of:,} ids are the same token to the draft, and are handed over as its own; the "
            "others are never drafted, and the draft reads each as the last token of its text"
        )
        return [Finding(text=text, severity=Verdict.PASS, place=place)]
    if subject.decoder is not None and isinstance(subject.decoder.drafter, TextDraft):
        text = "drafts go from one tokenizer to the other as text, so no id is handed over"
        return [Finding(text=text, severity=Verdict.PASS, place=place)]
    return []
