"""Associative recall: many keys, many values, and which belongs to which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..errors import LabError
from .base import Case, Task, unanswered
from .dice import Dice, Ints


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall as zoology makes it (Arora et al. 2023, arXiv 2312.04927).

    First the pairs (key, value), all keys different and all values different; then every key once more, at
    an even gap 2g after the pairs, g drawn without repetition with weights (g + 1) ** (power - 1). There
    the value is to be predicted. Token 0 fills the rest.

    Args:
        length: tokens. pairs: in training and in the split "same-pairs"; in "more-pairs" they grow with
            the length.
        vocabulary: 0 is the filler, the rest of the lower half are keys, the upper half values.
        random_filler: any token instead of 0 between the queries.
    """

    name: ClassVar[str] = "mqar"
    splits: ClassVar[tuple[str, ...]] = ("same-pairs", "more-pairs")
    step: ClassVar[int] = 2

    pairs: int = 8
    vocabulary: int = 512
    power: float = 0.01
    random_filler: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.pairs < self.vocabulary // 2:
            raise LabError(
                f"mqar: {self.pairs} pairs need a vocabulary of more than {2 * self.pairs + 1} tokens, "
                f"got {self.vocabulary}"
            )

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def chance(self) -> float:
        return 1 / self.pairs  # one of the values seen

    def smallest(self) -> int:
        return 4 * self.pairs

    def pairs_of(self, case: Case) -> int:
        grown = self.pairs * max(1, case.length // self.length)
        return min(grown, self.vocabulary // 2 - 1) if case.split == "more-pairs" else self.pairs

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        count, half = self.pairs_of(case), self.vocabulary // 2
        keys = 1 + dice.distinct(half - 1, count)
        values = half + dice.distinct(self.vocabulary - half, count)
        room = (case.length - 2 * count) // 2
        gaps = dice.weighted(np.arange(1.0, room + 1) ** (self.power - 1), count)
        filler = self.vocabulary if self.random_filler else 1
        tokens = dice.integers(0, filler, case.length)
        tokens[:, 0 : 2 * count : 2], tokens[:, 1 : 2 * count : 2] = keys, values
        targets = unanswered(tokens)
        np.put_along_axis(tokens, 2 * (count + gaps), keys, 1)
        np.put_along_axis(targets, 2 * (count + gaps), values, 1)
        return tokens, targets


@dataclass(frozen=True)
class NBack(Task):
    """Recall of the N-th last value a key was given, N = 1 the latest (Yang et al. 2025, arXiv 2505.16381).

    Keys and values alternate; a key that has been given `back` values before is a question for the oldest of
    the last `back` of them, and is then given a new one.

    Args:
        length: tokens. keys, values: how many there are.
    """

    name: ClassVar[str] = "mqar-nback"
    step: ClassVar[int] = 2

    length: int = field(default=128, kw_only=True)
    back: int = 2
    keys: int = 8
    values: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.back, self.keys, self.values) < 1:
            raise LabError(
                f"mqar-nback: back, keys and values must be at least 1, got {self.back}, {self.keys}, "
                f"{self.values}"
            )

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    @property
    def chance(self) -> float:
        return 1 / self.values

    def smallest(self) -> int:
        # so many tokens that every row has a question: some key must come once more
        return 2 * (self.back * self.keys + 1)

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        keys = dice.integers(0, self.keys, case.length // 2)
        values = dice.integers(self.keys, self.vocab_size, case.length // 2)
        tokens = np.stack([keys, values], -1).reshape(len(dice), -1)
        targets = unanswered(tokens)
        targets[:, 0::2] = self._earlier(keys, values)
        return tokens, targets

    def _earlier(self, keys: Ints, values: Ints) -> Ints:
        """For every key, the value it was given `back` times ago; -100 where there is none."""
        order = np.argsort(keys, axis=1, kind="stable")  # each key's own times, side by side
        grouped = np.take_along_axis(keys, order, 1)
        source = np.take_along_axis(values, order, 1)
        found = unanswered(keys)
        same = grouped[:, self.back :] == grouped[:, : -self.back]
        found[:, self.back :] = np.where(same, source[:, : -self.back], found[:, self.back :])
        out = unanswered(keys)
        np.put_along_axis(out, order, found, 1)
        return out
