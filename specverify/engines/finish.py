"""Why a text ended, in our words: from its tokens where an engine hands out no more, and else from what the engine says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.errors import SubjectError
from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.records import SamplingParams

__all__ = ["ended", "finish_of"]


def finish_of(token_ids: Sequence[int], params: SamplingParams, *, text: str = "") -> FinishReason:
    """From its last token, its text where stop strings were asked, and else its length.

    >>> from specverify.records import SamplingParams
    >>> str(finish_of([5, 2], SamplingParams(eos_token_ids=(2,))))
    'eos'
    """
    last = token_ids[-1] if token_ids else None
    if last in params.eos_token_ids:
        return FinishReason.EOS
    if last in params.stop_token_ids or any(stop in text for stop in params.stop_strings):
        return FinishReason.STOP
    return FinishReason.LENGTH


def ended(token_ids: Sequence[int], params: SamplingParams, reason: str | None) -> FinishReason:
    """The engine's own word, "stop" or "length", but for which stop it was. Raises `SubjectError` for another word.

    >>> from specverify.records import SamplingParams
    >>> [str(ended([5, 2], SamplingParams(eos_token_ids=(2,)), said)) for said in ("stop", "length")]
    ['eos', 'length']
    """
    if reason == "length":
        return FinishReason.LENGTH
    if reason != "stop":
        msg = f"the text {list(token_ids)} ended with {reason!r}, which is neither a stop nor a limit"
        raise SubjectError(msg)
    return FinishReason.EOS if token_ids and token_ids[-1] in params.eos_token_ids else FinishReason.STOP
