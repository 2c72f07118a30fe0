"""Counting with resets, after Golovneva et al. 2024 (contextual position encoding, arXiv 2405.18719)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..errors import LabError
from .base import Case, Task, unanswered
from .dice import Dice, Ints


@dataclass(frozen=True)
class Count(Task):
    """Operations on a few variables: set to zero, add one, or nothing; then each one's value is asked.

    An operation is nothing with probability `idle`; else it takes a variable at random, and sets it to zero
    once in six times, adds one otherwise. What would exceed `most` is nothing, so the values at any length
    are those of training.

    Args:
        length: operations. variables: how many; most: the largest value.
        idle: in training and in the split "same-rate"; 0.95 in the split "sparse".
    """

    name: ClassVar[str] = "count"
    splits: ClassVar[tuple[str, ...]] = ("same-rate", "sparse")

    length: int = field(default=128, kw_only=True)
    shortest: int = field(default=32, kw_only=True)
    variables: int = 3
    most: int = 10
    idle: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variables < 1 or self.most < 1 or not 0 <= self.idle <= 1:
            raise LabError(
                "count: variables and most must be at least 1 and idle a probability, got "
                f"{self.variables}, {self.most} and {self.idle}"
            )

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
