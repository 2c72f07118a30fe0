"""Random numbers for many rows at once, where each row's depend on nothing but its own key.

A generator with a state would tie a row to the rows drawn beside it; here number i of a row is a hash of
(key, i), so any rows of a batch can be made anywhere, together or alone, with the same result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..data.permutation import mix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: numbers hashed at once: each pass over them stays in a core's cache
AT_ONCE = 1 << 15
#: the smallest of a row are found one by one up to so many: for 4 of 4,096 a twelfth of the time of a partition
FEW = 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Dice:
    """One stream of random numbers a row; results have the rows first.

    Args:
        path: whole numbers that name the stream, such as (seed, stream, step).
        rows: which rows of it.
    """

    def __init__(self, path: tuple[int, ...], rows: range) -> None:
        key = np.zeros(len(rows), dtype=np.uint64)
        for part in path:
            key = mix(key + _GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
        self.keys = mix(mix(key + _GOLDEN) ^ np.asarray(rows, dtype=np.uint64) * _GOLDEN)
        self.used = 0

    def __len__(self) -> int:
        return len(self.keys)

    def uniform(self, *shape: int) -> Floats:
        """In [0, 1), of shape (rows, *shape)."""
        count = int(np.prod(shape, dtype=np.int64))
        steps = np.arange(self.used + 1, self.used + count + 1, dtype=np.uint64) * _GOLDEN
        self.used += count
        drawn, rows = np.empty((len(self), count)), max(1, AT_ONCE // max(1, count))
        for first in range(0, len(self), rows):
            words = mix(self.keys[first : first + rows, None] + steps)
            np.multiply(words >> np.uint64(11), 2.0**-53, out=drawn[first : first + rows])
        return drawn.reshape(len(self), *shape)

    def integers(self, low: int, high: int, *shape: int) -> Ints:
        """In low … high - 1, all as likely."""
        return (low + self.uniform(*shape) * (high - low)).astype(np.int64)

    def distinct(self, choices: int, count: int) -> Ints:
        """(rows, count): different numbers below `choices`, in random order."""
        return _least(self.uniform(choices), count)

    def weighted(self, weights: Floats, count: int) -> Ints:
        """(rows, count): different indices, drawn one after another in proportion to what is left.

        The first to ring of exponential clocks with these rates: the same law, without a loop.
        """
        clocks = -np.log1p(-self.uniform(len(weights))) / weights
        return _least(clocks, count)


def _least(numbers: Floats, count: int) -> Ints:
    """(rows, count): the indices of the smallest, in their order. `numbers` may be overwritten."""
    if count <= FEW:
        rows, found = np.arange(len(numbers)), np.empty((len(numbers), count), dtype=np.int64)
        for i in range(count):
            found[:, i] = numbers.argmin(1)
            numbers[rows, found[:, i]] = np.inf
        return found
    first = np.argpartition(numbers, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(numbers, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
