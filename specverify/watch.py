"""How a run tells whoever watches that it moves; the default tells nobody."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Silent", "Watch"]


class Watch(Protocol):
    """Called by the job, stage after stage."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` units begins; the one before has ended."""
        ...

    def advance(self, amount: int = 1) -> None:
        """So many units of the stage are done."""
        ...

    def close(self) -> None:
        """The last stage has ended."""
        ...


class Silent:
    """Nobody watches."""

    def stage(self, name: str, total: int) -> None:
        """Say nothing."""

    def advance(self, amount: int = 1) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""
