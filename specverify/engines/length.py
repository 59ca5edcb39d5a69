"""Positions that an engine has, for those that would go past them without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.errors import PromptError

if TYPE_CHECKING:
    from specverify.records import DecodeRequest

__all__ = ["require_room"]


def require_room(request: DecodeRequest, max_length: int, name: str) -> None:
    """Raise `PromptError` for a request whose prompt and new tokens are more than the engine `name` has positions."""
    length = len(request.prompt_ids) + request.params.max_new_tokens
    if length > max_length:
        msg = f"{request.id} asks for {length} positions, and {name} has {max_length}; shorten the prompt"
        raise PromptError(msg)
