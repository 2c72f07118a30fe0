"""Associative recall: which value belongs to a key."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from pydantic import model_validator

from ..config import Positive
from .base import Case, Task, unanswered
from .dice import Dice, Ints


class Recall(Task):
    """Multi-query associative recall as zoology makes it (Arora et al. 2023, arXiv 2312.04927).

    First come the pairs (key, value), with distinct keys and distinct values. Then each key comes again, at
    an even gap 2g after the pairs, g drawn without repetition with weights (g + 1) ** (power - 1); there its
    value is predicted. Token 0 fills the rest.

    Args:
        length: tokens. pairs: in training and in the split "same-pairs"; in "more-pairs" they grow with
            the length.
        vocabulary: 0 is the filler, the rest of the lower half are keys, the upper half values.
        random_filler: any token instead of 0 between the queries.
    """

    name: ClassVar[str] = "mqar"
    splits: ClassVar[tuple[str, ...]] = ("same-pairs", "more-pairs")
    step: ClassVar[int] = 2

    pairs: Positive = 8
    vocabulary: Positive = 512
    power: float = 0.01
    random_filler: bool = False

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.pairs >= self.vocabulary // 2:
            raise ValueError(
                f"{self.pairs} pairs need a vocabulary of at least {2 * self.pairs + 2}, got {self.vocabulary}"
            )
        return self

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def chance(self) -> float:
        return 1 / self.pairs  # one of the values seen

    def smallest(self) -> int:
        return 4 * self.pairs

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        count, half = self.pairs, self.vocabulary // 2
        if case.split == "more-pairs":
            count = min(count * max(1, case.length // self.length), half - 1)
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


class NBack(Task):
    """Recall of the N-th last value a key was given, N = 1 the latest (Yang et al. 2025, arXiv 2505.16381).

    Keys and values alternate. A key that had `back` values before asks for the oldest of its last `back`
    values, and then gets a new one.

    Args:
        length: tokens. keys, values: how many there are.
    """

    name: ClassVar[str] = "mqar-nback"
    step: ClassVar[int] = 2

    length: Positive = 128
    back: Positive = 2
    keys: Positive = 8
    values: Positive = 32

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    @property
    def chance(self) -> float:
        return 1 / self.values

    def smallest(self) -> int:
        # every row has a question: some key comes `back` + 1 times
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
        """For every key, its `back`-th last value; -100 where there is none."""
        order = np.argsort(keys, axis=1, kind="stable")  # groups the times of each key
        grouped = np.take_along_axis(keys, order, 1)
        source = np.take_along_axis(values, order, 1)
        found = unanswered(keys)
        same = grouped[:, self.back :] == grouped[:, : -self.back]
        found[:, self.back :] = np.where(same, source[:, : -self.back], found[:, self.back :])
        out = unanswered(keys)
        np.put_along_axis(out, order, found, 1)
        return out
