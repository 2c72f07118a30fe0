"""Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300), on synthetic tokens."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..config import Natural, Positive
from .base import Case, Task, answered
from .dice import Dice, Ints

DIGITS = 10


class Passkey(Task):
    """Repeated filler with a number in it that is asked for at the end. A marker stands before the number and
    at the end.

    Args:
        length: tokens that are read. digits: of the number. filler: tokens after which the filler repeats.
    """

    name: ClassVar[str] = "passkey"
    depths: ClassVar[tuple[float | None, ...]] = (0.0, 0.25, 0.5, 0.75, 1.0)

    length: Positive = 128
    shortest: Natural = 32
    digits: Positive = 5
    filler: Positive = 24

    @property
    def vocab_size(self) -> int:
        return DIGITS + 1 + self.filler

    @property
    def chance(self) -> float:
        return 1 / DIGITS

    def smallest(self) -> int:
        return 2 * self.digits + 1  # marker, number, marker, all but one of the answer

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        """Tokens: the digits, the marker, the filler. Without a depth it is uniform."""
        self.check_case(case)
        room, secret = case.length - self.smallest(), dice.integers(0, DIGITS, self.digits)
        depth = dice.uniform() if case.depth is None else np.full(len(dice), case.depth)
        place = np.minimum((depth * (room + 1)).astype(np.int64), room)[:, None]
        where = np.broadcast_to(np.arange(room + self.digits + 1), (len(dice), room + self.digits + 1))
        before = where < place
        filler = DIGITS + 1 + np.where(before, where, where - self.digits - 1) % self.filler
        hidden = np.concatenate([np.full((len(dice), 1), DIGITS), secret], 1)
        text = filler.copy()
        np.put_along_axis(text, place + np.arange(self.digits + 1), hidden, 1)
        question = np.concatenate([text, np.full((len(dice), 1), DIGITS)], 1)
        return answered(question, secret)
