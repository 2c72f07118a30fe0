"""Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300), in tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..errors import LabError
from .base import Case, Task, answered
from .dice import Dice, Ints

DIGITS = 10


@dataclass(frozen=True)
class Passkey(Task):
    """Filler that repeats itself, a number hidden somewhere in it, and at the end the question for it.

    A marker announces the number; the same marker at the end asks for it.

    Args:
        length: tokens that are read. digits: of the number. filler: tokens after which the filler repeats.
    """

    name: ClassVar[str] = "passkey"
    depths: ClassVar[tuple[float | None, ...]] = (0.0, 0.25, 0.5, 0.75, 1.0)

    length: int = field(default=128, kw_only=True)
    shortest: int = field(default=32, kw_only=True)
    digits: int = 5
    filler: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.digits < 1 or self.filler < 1:
            raise LabError(
                f"passkey: digits and filler must be at least 1, got {self.digits} and {self.filler}"
            )

    @property
    def vocab_size(self) -> int:
        return DIGITS + 1 + self.filler

    @property
    def chance(self) -> float:
        return 1 / DIGITS

    def smallest(self) -> int:
        return 2 * self.digits + 1  # marker, number, marker, all but one of the answer

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        """Tokens: the digits, the marker, the filler. The depth is uniform where none is asked for."""
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
