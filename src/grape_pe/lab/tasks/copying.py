"""Strings to repeat: unchanged, reversed, sorted, or the symbols between blanks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ..config import Natural, Positive
from .base import Case, Task, answered, unanswered
from .dice import Dice, Ints

Symbols = Annotated[int, Field(ge=2)]


class StringTask(Task):
    """Symbols, a separator, and the answer, which has as many symbols.

    Args:
        length: symbols of the string. symbols: how many there are; the separator comes after them.
    """

    length: Positive = 32
    shortest: Natural = 8
    symbols: Symbols = 16

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @abstractmethod
    def answer(self, string: Ints) -> Ints:
        """The answer to each row."""

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        string = dice.integers(0, self.symbols, case.length)
        separator = np.full((len(dice), 1), self.symbols)
        return answered(np.concatenate([string, separator], 1), self.answer(string))


class Copy(StringTask):
    """The string unchanged."""

    name: ClassVar[str] = "copy"

    def answer(self, string: Ints) -> Ints:
        return string


class Reverse(StringTask):
    """The string reversed."""

    name: ClassVar[str] = "reverse"

    def answer(self, string: Ints) -> Ints:
        return string[:, ::-1]


class Sort(StringTask):
    """The symbols sorted."""

    name: ClassVar[str] = "sort"

    def answer(self, string: Ints) -> Ints:
        return np.sort(string, 1)


class SelectiveCopy(Task):
    """Symbols among blanks, to repeat in order (Gu and Dao 2023, arXiv 2312.00752).

    One marker for each symbol follows the string; at the i-th marker the i-th symbol is predicted. The answer
    is never among the inputs.

    Args:
        length: places of the string. data: those that hold a symbol, at random; the others are blank.
    """

    name: ClassVar[str] = "selective-copy"

    length: Positive = 128
    shortest: Natural = 32
    data: Positive = 16
    symbols: Symbols = 14

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def smallest(self) -> int:
        return self.data

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        blank, marker = 0, self.symbols + 1
        kept = 1 + dice.integers(0, self.symbols, self.data)
        tokens = np.full((len(dice), case.length + self.data), blank)
        tokens[:, case.length :] = marker
        np.put_along_axis(tokens, np.sort(dice.distinct(case.length, self.data), 1), kept, 1)
        targets = unanswered(tokens)
        targets[:, case.length :] = kept
        return tokens, targets
