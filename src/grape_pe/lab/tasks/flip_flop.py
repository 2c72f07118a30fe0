"""Flip-flop language modelling (Liu et al. 2023, arXiv 2306.00946): one bit of memory among distractors."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from ..config import Fraction, Positive
from .base import TRAIN, Case, Task, unanswered
from .dice import Dice, Ints

#: token ids of the published data
WRITE, READ, IGNORE_BIT, ZERO = 0, 1, 2, 3


class FlipFlop(Task):
    """Instructions w, r, i, each followed by a bit; after r comes the bit last written.

    The first instruction is w, the last r. Those between are i with probability p, w and r with (1 - p) / 2
    each. The bits after w and i are fair coins.

    Args:
        length: tokens, two for each instruction.
        ignore: p in training and in the split "in-distribution".
        loss: "read" trains on the bits after r alone, "all" on every next token, as a language model.
    """

    name: ClassVar[str] = "flip-flop"
    splits: ClassVar[tuple[str, ...]] = ("in-distribution", "sparse", "dense")
    step: ClassVar[int] = 2

    length: Positive = 512
    ignore: Fraction = 0.8
    loss: Literal["read", "all"] = "read"

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
        rate = {"sparse": 0.98, "dense": 0.1}.get(case.split, self.ignore)
        drawn = dice.uniform(case.length // 2)
        instructions = np.where(drawn < rate, IGNORE_BIT, np.where(drawn < (1 + rate) / 2, WRITE, READ))
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        bits = _register(instructions, dice.integers(0, 2, case.length // 2))
        tokens = np.stack([instructions, bits + ZERO], -1).reshape(len(dice), -1)
        follows = np.roll(tokens, -1, 1)
        known = (tokens == READ) | (case.split == TRAIN and self.loss == "all")
        targets = np.where(known, follows, unanswered(tokens))
        targets[:, -1] = unanswered(tokens[:, -1])
        return tokens, targets


def _register(instructions: Ints, bits: Ints) -> Ints:
    """The bits, with those after r replaced by the last one written."""
    where = np.arange(instructions.shape[1])
    written = np.maximum.accumulate(np.where(instructions == WRITE, where, 0), 1)
    return np.where(instructions == READ, np.take_along_axis(bits, written, 1), bits)
