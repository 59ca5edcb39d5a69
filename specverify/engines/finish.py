"""Why a text ended, for engines that hand out tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.records import SamplingParams

__all__ = ["finish_of"]


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
