"""Flip-flop language modelling (Liu et al. 2023, arXiv 2306.00946): one bit of memory, and much to ignore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..errors import LabError
from .base import TRAIN, Case, Task, unanswered
from .dice import Dice, Ints

#: token ids of the published data
WRITE, READ, IGNORE_BIT, ZERO = 0, 1, 2, 3


@dataclass(frozen=True)
class FlipFlop(Task):
    """Instructions w, r, i, each followed by a bit; after r comes the bit last written.

    The first instruction is w, the last r. Those between are i with probability p, w and r with (1 - p) / 2
    each. The bits after w and i are fair coins.

    Args:
        length: tokens, two for each instruction.
        ignore: p in training and in the split "in-distribution".
        loss: "read", only what can be known is learned, or "all", every next token, as a language model.
    """

    name: ClassVar[str] = "flip-flop"
    splits: ClassVar[tuple[str, ...]] = ("in-distribution", "sparse", "dense")
    step: ClassVar[int] = 2

    length: int = field(default=512, kw_only=True)
    ignore: float = 0.8
    loss: str = "read"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ignore <= 1:
            raise LabError(f"flip-flop: ignore must be a probability from 0 to 1, got {self.ignore}")
        if self.loss not in ("read", "all"):
            raise LabError(f'flip-flop: loss must be "read" or "all", got {self.loss!r}')

    @property
    def vocab_size(self) -> int:
        return 5

    @property
    def chance(self) -> float:
        return 1 / 2

    def smallest(self) -> int:
        return 4

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        instructions = self._instructions(dice, case)
        bits = _register(instructions, dice.integers(0, 2, instructions.shape[1]))
        tokens = np.stack([instructions, bits + ZERO], -1).reshape(len(dice), -1)
        follows = np.roll(tokens, -1, 1)
        known = (tokens == READ) | (case.split == TRAIN and self.loss == "all")
        targets = np.where(known, follows, unanswered(tokens))
        targets[:, -1] = unanswered(tokens[:, -1])
        return tokens, targets

    def _instructions(self, dice: Dice, case: Case) -> Ints:
        rate = {"sparse": 0.98, "dense": 0.1}.get(case.split, self.ignore)
        drawn = dice.uniform(case.length // 2)
        chosen = np.where(drawn < rate, IGNORE_BIT, np.where(drawn < (1 + rate) / 2, WRITE, READ))
        chosen[:, 0], chosen[:, -1] = WRITE, READ
        return chosen


def _register(instructions: Ints, bits: Ints) -> Ints:
    """The bits, with those after r replaced by the last one written."""
    where = np.arange(instructions.shape[1])
    written = np.maximum.accumulate(np.where(instructions == WRITE, where, 0), 1)
    return np.where(instructions == READ, np.take_along_axis(bits, written, 1), bits)
