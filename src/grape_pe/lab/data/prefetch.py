"""Computation of a few items ahead, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from .batches import Batch, Batches

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_order(
    pool: Executor, call: Callable[[Given], Made], items: Iterable[Given], ahead: int
) -> Iterator[Made]:
    """`call` of each item in the pool, in order; at most `ahead` more are in progress."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        waiting.append(pool.submit(call, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def prefetch(
    batches: Batches, steps: Iterable[int], rows_of: Callable[[int], Sequence[range]], *, depth: int = 2
) -> Generator[tuple[int, list[Batch]], None, None]:
    """Read the next batches in a thread while the current one is computed.

        for step, parts in prefetch(batches, range(100), lambda step: [range(8)]): ...

    Yields (step, [a Batch for each range of rows_of(step)]) in the order of `steps`. Errors of reading are raised
    here. Close it (`contextlib.closing`) if not all steps are consumed.

    Args:
        batches: where the rows come from.
        steps: the steps to read, in order.
        rows_of: gives the ranges of rows to read at a step; each becomes one batch.
        depth: steps read ahead.
    """

    def read(step: int) -> tuple[int, list[Batch]]:
        return step, [batches.batch(step, rows) for rows in rows_of(step)]

    pool = ThreadPoolExecutor(1, "grape-prefetch")
    try:
        yield from in_order(pool, read, steps, depth)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
