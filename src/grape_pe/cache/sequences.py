"""Lengths, positions and padding of cached sequences, as Python numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .layout import Layout

#: (index, position) of a token that is not one position after the token before it
Jump = tuple[int, float]


@dataclass
class Sequences:
    """Lengths and positions of the sequences of a batch, as Python numbers, so that no tensor has to be read.

    Args:
        lengths: number of tokens of each sequence; empty for an empty cache.
        next: the next position of each sequence; None with several coordinates.
        jumps: for each sequence, the tokens whose position is not one after that of the token before (the first
            token: not 0); empty if there are none.
        columns: number of tokens plus padding over all calls, which is the width of an attention mask.
        padded: for each sequence, the columns that are padding; empty if none are.
    """

    lengths: list[int] = field(default_factory=list)
    next: list[float] | None = None
    jumps: list[list[Jump]] = field(default_factory=list)
    columns: int = 0
    padded: list[list[int]] = field(default_factory=list)

    def append(self, layout: Layout, batch: int, count: int) -> None:
        """Add the `count` tokens of a layout."""
        lengths, counts = self.lengths or [0] * batch, layout.counts or [count] * batch
        if layout.places is not None:
            self._append_jumps(layout.places, lengths)
        self.lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
        self.next = layout.next
        self.append_columns(layout, count)

    def append_columns(self, layout: Layout, count: int) -> None:
        """Add columns of the attention mask only."""
        if layout.holes is not None:
            old, first = self.padded or [[] for _ in layout.holes], self.columns
            self.padded = [a + [first + i for i in b] for a, b in zip(old, layout.holes, strict=True)]
        self.columns += count

    def _append_jumps(self, places: Sequence[list[float]], lengths: Sequence[int]) -> None:
        old, starts = self.jumps or [[]] * len(places), self.next or [0] * len(places)
        self.jumps = []
        for jumps, row, length, start in zip(old, places, lengths, starts, strict=True):
            pairs = enumerate(zip([start - 1, *row], row, strict=False), length)
            self.jumps.append(jumps + [(i, place) for i, (before, place) in pairs if place != before + 1])

    def crop(self, counts: Sequence[int]) -> None:
        """Remove the last counts[b] tokens of each sequence b. An emptied sequence starts at 0 again."""
        self.lengths = [n - c for n, c in zip(self.lengths, counts, strict=True)]
        rows = list(zip(self.jumps or [[]] * len(self.lengths), self.lengths, strict=True))
        self.jumps = [[jump for jump in jumps if jump[0] < length] for jumps, length in rows]
        if self.next is not None:
            last = [jumps[-1] if jumps else (0, 0) for jumps in self.jumps]
            self.next = [place + n - i if n else 0 for (i, place), n in zip(last, self.lengths, strict=True)]
        self.columns = max(self.lengths)
        self.padded = [list(range(self.columns - n)) for n in self.lengths] if self.padded else []

    def tokens_of(self, columns: int) -> list[int]:
        """The number of tokens of each sequence in the last `columns` columns."""
        first, padded = self.columns - columns, self.padded or [[] for _ in self.lengths]
        return [columns - sum(column >= first for column in row) for row in padded]

    @property
    def batch(self) -> int:
        """Number of sequences; 0 for an empty cache."""
        return len(self.lengths or self.padded)

    @property
    def gaps(self) -> bool:
        """Whether there is padding between or after tokens."""
        return any(row != list(range(len(row))) for row in self.padded)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the sequences `rows`, in that order."""
        self.lengths = [self.lengths[row] for row in rows] if self.lengths else []
        self.next = None if self.next is None else [self.next[row] for row in rows]
        self.jumps = [self.jumps[row] for row in rows] if self.jumps else []
        self.padded = [self.padded[row] for row in rows] if self.padded else []

    def move(self, offset: float) -> None:
        """Make all positions smaller by `offset`."""
        assert self.next is not None
        self.next = [p - offset if n else p for p, n in zip(self.next, self.lengths, strict=True)]
        jumps = self.jumps or [[]] * len(self.lengths)
        first: list[Jump] = [(0, 0)]
        rows = [
            row if not n or (row[:1] and row[0][0] == 0) else first + row
            for row, n in zip(jumps, self.lengths, strict=True)
        ]
        self.jumps = [[(i, place - offset) for i, place in row] for row in rows]

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def saved(self) -> dict[str, Any]:
        """The fields by name, copied."""
        return copy.deepcopy(self.__dict__)
