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
        words = mix(self.keys[:, None] + steps)
        return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(len(self), *shape)

    def integers(self, low: int, high: int, *shape: int) -> Ints:
        """In low … high - 1, all as likely."""
        return (low + self.uniform(*shape) * (high - low)).astype(np.int64)

    def distinct(self, choices: int, count: int) -> Ints:
        """(rows, count): different numbers below `choices`, in random order."""
        return self.weighted(np.ones(choices), count)

    def weighted(self, weights: Floats, count: int) -> Ints:
        """(rows, count): different indices, drawn one after another in proportion to what is left.

        The first to ring of exponential clocks with these rates: the same law, without a loop.
        """
        clocks = -np.log1p(-self.uniform(len(weights))) / weights
        first = np.argpartition(clocks, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(clocks, first, 1), axis=1)
        return np.take_along_axis(first, order, 1)
