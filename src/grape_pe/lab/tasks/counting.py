"""Counting with resets, after Golovneva et al. 2024 (contextual position encoding, arXiv 2405.18719)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..config import Fraction, Natural, Positive
from .base import Case, Task, unanswered
from .dice import Dice, Ints


class Count(Task):
    """Operations on a few variables: set to zero, add one, or nothing; then each one's value is asked.

    An operation is nothing with probability `idle`. Otherwise it takes a random variable and sets it to zero
    (probability 1/6) or adds one. An addition beyond `most` is nothing, so values are alike at all lengths.

    Args:
        length: operations. variables: how many; most: the largest value.
        idle: in training and in the split "same-rate"; 0.95 in the split "sparse".
    """

    name: ClassVar[str] = "count"
    splits: ClassVar[tuple[str, ...]] = ("same-rate", "sparse")

    length: Positive = 128
    shortest: Natural = 32
    variables: Positive = 3
    most: Positive = 10
    idle: Fraction = 0.7

    @property
    def vocab_size(self) -> int:
        return 1 + 3 * self.variables + self.most + 1

    @property
    def chance(self) -> float:
        return 1 / (self.most + 1)

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        """Tokens: 0 nothing, then set, add and ask for each variable, then the values."""
        self.check_case(case)
        idle = 0.95 if case.split == "sparse" else self.idle
        acts = dice.uniform(case.length) >= idle
        which, sets = dice.integers(0, self.variables, case.length), dice.uniform(case.length) < 1 / 6
        operations, values = np.zeros_like(which), []
        for variable in range(self.variables):
            mine = acts & (which == variable)
            kept, value = _count(mine & sets, mine & ~sets, self.most)
            operations += np.where(mine & sets, 1 + variable, 0)
            operations += np.where(kept, 1 + self.variables + variable, 0)
            values.append(value)
        asked = np.tile(1 + 2 * self.variables + np.arange(self.variables), (len(dice), 1))
        tokens = np.concatenate([operations, asked], 1)
        targets = unanswered(tokens)
        targets[:, case.length :] = 1 + 3 * self.variables + np.stack(values, 1)
        return tokens, targets


def _count(sets: np.ndarray, adds: np.ndarray, most: int) -> tuple[np.ndarray, Ints]:
    """Which additions count (those up to `most` since the last set), and the value at the end."""
    total = adds.cumsum(1)
    since = total - np.maximum.accumulate(np.where(sets, total, 0), 1)
    return adds & (since <= most), np.minimum(since[:, -1], most)
