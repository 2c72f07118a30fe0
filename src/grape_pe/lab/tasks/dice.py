"""Random numbers for many rows at once; those of a row depend on its own key alone.

Number i of a row is a hash of (key, i), so any rows of a batch can be generated together or alone, in any
process, with the same result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..data.permutation import mix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: numbers hashed at once, to fit a core's cache
AT_ONCE = 1 << 15
#: up to this many smallest numbers are found one by one (4 of 4,096: a twelfth of the time of a partition)
FEW = 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Dice:
    """One stream of random numbers per row; results have shape (rows, …).

    Args:
        path: integers that name the stream, such as (seed, stream, step).
        rows: the rows of the stream.
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
        """Uniform in low … high - 1."""
        return (low + self.uniform(*shape) * (high - low)).astype(np.int64)

    def distinct(self, choices: int, count: int) -> Ints:
        """(rows, count): different numbers below `choices`, in random order."""
        return _least(self.uniform(choices), count)

    def weighted(self, weights: Floats, count: int) -> Ints:
        """(rows, count): different indices, drawn without replacement in proportion to the weights.

        Sorting exponential variables with these rates gives the same distribution without a loop.
        """
        clocks = -np.log1p(-self.uniform(len(weights))) / weights
        return _least(clocks, count)


def _least(numbers: Floats, count: int) -> Ints:
    """(rows, count): the indices of the smallest numbers, ascending. May overwrite `numbers`."""
    if count <= FEW:
        rows, found = np.arange(len(numbers)), np.empty((len(numbers), count), dtype=np.int64)
        for i in range(count):
            found[:, i] = numbers.argmin(1)
            numbers[rows, found[:, i]] = np.inf
        return found
    first = np.argpartition(numbers, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(numbers, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
