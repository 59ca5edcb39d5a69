"""Independent pieces of work side by side: torch lets go of the interpreter while it computes, so threads are enough.

Note [Threads]: a small model gains nothing from two threads in one operation, and everything from two batches at once. A
piece never depends on its neighbours, so the number of workers changes no result.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Elsewhere", "mapped"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Elsewhere(Protocol):
    """Other processes that hold the same models: the pieces are cut here as ever, and computed there (Note [Cluster])."""

    def decode(self, batches: Sequence[Any]) -> list[Any]:
        """The traces of each batch of rows, in order."""
        ...

    def score(self, chunks: Sequence[Any], *, sampled: bool, stages: bool) -> list[Any]:
        """The columns of each chunk of traces, in order."""
        ...


def mapped(function: Callable[[Item], Result], items: Sequence[Item], *, workers: int) -> list[Result]:
    """`function` of each item, in order; the first exception is raised, and what was not begun is not run."""
    if workers == 1 or len(items) < 2:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(function, item) for item in items]
        results = [future.result() for future in futures]
    except BaseException as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)  # Ctrl-C does not wait for a batch to end
        raise
    pool.shutdown()
    return results
