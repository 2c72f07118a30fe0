"""What a cache knows of its sequences without looking at tensors: lengths, positions, columns of padding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .layout import Layout

#: positions of consecutive tokens, in steps of one: (first position, number of tokens)
Run = tuple[float, int]


@dataclass
class Sequences:
    """Lengths and positions of the sequences of a batch; plain numbers, so a step reads no tensor.

    lengths: tokens of each sequence; empty for an empty cache.
    next: the position that follows, of each sequence; None with several coordinates.
    runs: all positions of each sequence; None while they go on in steps of one.
    columns: tokens and padding of all calls, which is the width of an attention mask.
    padded: which of the columns are padding, for each sequence; empty if none is.
    """

    lengths: list[int] = field(default_factory=list)
    next: list[float] | None = None
    runs: list[list[Run]] | None = None
    columns: int = 0
    padded: list[list[int]] = field(default_factory=list)

    def append(self, layout: Layout, batch: int, count: int) -> None:
        lengths, counts = self.lengths or [0] * batch, layout.counts or [count] * batch
        if layout.places is not None or self.runs is not None:
            self._append_runs(layout, lengths, counts)
        self.lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
        self.next = layout.next
        self.append_columns(layout, count)

    def append_columns(self, layout: Layout, count: int) -> None:
        if layout.holes is not None:
            old, first = self.padded or [[] for _ in layout.holes], self.columns
            self.padded = [a + [first + i for i in b] for a, b in zip(old, layout.holes, strict=True)]
        self.columns += count

    def _append_runs(self, layout: Layout, lengths: Sequence[int], counts: Sequence[int]) -> None:
        starts = self.next or [0.0] * len(lengths)
        if self.runs is None:
            self.runs = [[(p - n, n)] if n else [] for p, n in zip(starts, lengths, strict=True)]
        for runs, start, count, b in zip(self.runs, starts, counts, range(len(counts)), strict=True):
            for place in [start + i for i in range(count)] if layout.places is None else layout.places[b]:
                if runs and sum(runs[-1]) == place:
                    runs[-1] = runs[-1][0], runs[-1][1] + 1
                else:
                    runs.append((place, 1))

    def crop(self, counts: Sequence[int]) -> None:
        """Without the last counts[b] tokens of each sequence; a sequence without tokens begins at 0 again."""
        self.lengths = [n - c for n, c in zip(self.lengths, counts, strict=True)]
        if self.runs is not None:
            self.runs = [_cropped(runs, c) for runs, c in zip(self.runs, counts, strict=True)]
            self.next = [sum(runs[-1]) if runs else 0 for runs in self.runs]
        elif self.next is not None:
            left = zip(self.next, counts, self.lengths, strict=True)
            self.next = [place - c if length else 0 for place, c, length in left]
        self.columns = max(self.lengths)
        self.padded = [list(range(self.columns - n)) for n in self.lengths] if self.padded else []

    def tokens_of(self, columns: int) -> list[int]:
        """How many tokens of each sequence stand in the last `columns` columns."""
        first, padded = self.columns - columns, self.padded or [[] for _ in self.lengths]
        return [columns - sum(column >= first for column in row) for row in padded]

    @property
    def batch(self) -> int:
        """Sequences seen so far; 0 for an empty cache."""
        return len(self.lengths or self.padded)

    @property
    def gaps(self) -> bool:
        """Whether padding stands between tokens or after them."""
        return any(row != list(range(len(row))) for row in self.padded)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows] if self.lengths else []
        self.next = None if self.next is None else [self.next[row] for row in rows]
        self.runs = None if self.runs is None else [list(self.runs[row]) for row in rows]
        self.padded = [self.padded[row] for row in rows] if self.padded else []

    def move(self, offset: float) -> None:
        """All positions smaller by `offset`."""
        assert self.next is not None
        self.next = [p - offset if n else p for p, n in zip(self.next, self.lengths, strict=True)]
        if self.runs is not None:
            self.runs = [[(first - offset, n) for first, n in runs] for runs in self.runs]

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


def _cropped(runs: Sequence[Run], count: int) -> list[Run]:
    """Runs without their last `count` tokens."""
    kept = list(runs)
    while count:
        first, number = kept.pop()
        removed = min(number, count)
        if removed < number:
            kept.append((first, number - removed))
        count -= removed
    return kept
