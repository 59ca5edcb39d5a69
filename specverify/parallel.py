"""Independent pieces of work side by side: torch lets go of the interpreter while it computes, so threads are enough.

Note [Threads]: a small model gains nothing from two threads in one operation, and everything from two batches at once. A
piece never depends on its neighbours, so the number of workers changes no result.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["mapped"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped(function: Callable[[Item], Result], items: Sequence[Item], *, workers: int) -> list[Result]:
    """`function` of each item, in order; the first exception is raised, and what was not begun is not run."""
    if workers == 1 or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
