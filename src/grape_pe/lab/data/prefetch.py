"""Reading the next batches in a background thread while the current one is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from .batches import Batch, Batches

Rows = Callable[[int], Sequence[range]]
Item = tuple[int, list[Batch]]


class Prefetch(Iterator[Item]):
    """Yields (step, [a Batch for each range of rows_of(step)]) in the order of `steps`.

    At most `depth` steps wait in the queue. What the reading thread raises is raised by `next`. Close it, or
    use it in a `with` statement, if the steps are not all consumed.
    """

    def __init__(self, batches: Batches, steps: Iterable[int], rows_of: Rows, depth: int = 2):
        self._queue: queue.Queue[Item | BaseException | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._done = False
        work = (batches, steps, rows_of)
        self._thread = threading.Thread(target=self._read, args=work, name="grape-prefetch", daemon=True)
        self._thread.start()

    def _read(self, batches: Batches, steps: Iterable[int], rows_of: Rows) -> None:
        try:
            for step in steps:
                if not self._put((step, [batches.batch(step, rows) for rows in rows_of(step)])):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException | None) -> bool:
        """Wait for room, but never for a consumer that has gone."""
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __next__(self) -> Item:
        if self._done:
            raise StopIteration
        item = self._queue.get()
        if item is None or isinstance(item, BaseException):
            self.close()
            raise StopIteration if item is None else item
        return item

    def close(self) -> None:
        """Stop reading and wait for the thread to end."""
        self._done = True
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetch(batches: Batches, steps: Iterable[int], rows_of: Rows, *, depth: int = 2) -> Prefetch:
    """Read ahead: `for step, parts in prefetch(batches, range(100), lambda step: [range(8)]): ...`

    Args:
        batches: where the rows come from.
        steps: the steps to read, in order.
        rows_of: gives the ranges of rows to read at a step; each becomes one batch.
        depth: steps read ahead.
    """
    return Prefetch(batches, steps, rows_of, depth)
