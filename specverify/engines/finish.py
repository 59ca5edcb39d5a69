"""Why a text ended, for engines that hand out tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.records import SamplingParams

__all__ = ["finish_of"]


def finish_of(token_ids: Sequence[int], params: SamplingParams) -> FinishReason:
    """From its last token and its length; a stop string, where one was asked, is what else could have ended it.

    >>> from specverify.records import SamplingParams
    >>> str(finish_of([5, 2], SamplingParams(eos_token_ids=(2,))))
    'eos'
    """
    last = token_ids[-1] if token_ids else None
    if last in params.eos_token_ids:
        return FinishReason.EOS
    if last in params.stop_token_ids or (params.stop_strings and len(token_ids) < params.max_new_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH
