"""Watching a run on standard error: a bar a stage in a terminal, a line a stage elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.cli.exits import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from specverify.watch import Watch

__all__ = ["Bars", "Lines", "watching"]


def watching(console: Console, *, quiet: bool, as_json: bool) -> Watch:
    """What fits: nothing when quiet, bars in a terminal, lines where a log is kept."""
    from specverify.watch import Silent

    if quiet:
        return Silent()
    return Bars(console) if console.is_terminal and not as_json else Lines()


class Lines:
    """One line a stage."""

    def stage(self, name: str, total: int) -> None:
        """Say that it begins."""
        del total
        say(f"{name} …")

    def advance(self, amount: int = 1) -> None:
        """Say nothing: a log is not a bar."""

    def close(self) -> None:
        """Say nothing."""


class Bars:
    """One bar a stage."""

    def __init__(self, console: Console) -> None:
        """Nothing is drawn before the first stage."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("so far,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._task: TaskID | None = None
        self._total = 0

    def stage(self, name: str, total: int) -> None:
        """End the bar before, and begin one."""
        self._finish()
        self._progress.start()
        self._total = max(total, 1)  # a stage that asks the engine nothing is one unit of work, not none
        self._task = self._progress.add_task(name, total=self._total)

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def close(self) -> None:
        """Give the terminal back; may be called again."""
        self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        """A stage may be decided before all of it was asked."""
        if self._task is not None:
            self._progress.update(self._task, completed=self._total)
            self._progress.stop_task(self._task)
            self._task = None
