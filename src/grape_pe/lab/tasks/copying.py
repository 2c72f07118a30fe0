"""Strings to be given back: as they came, reversed, sorted, or only the part that matters."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..errors import LabError
from .base import Case, Task, answered, unanswered
from .dice import Dice, Ints


@dataclass(frozen=True)
class StringTask(Task):
    """Symbols, a separator, and the answer, which has as many symbols.

    Args:
        length: symbols of the string. symbols: how many there are; the separator comes after them.
    """

    length: int = field(default=32, kw_only=True)
    shortest: int = field(default=8, kw_only=True)
    symbols: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symbols < 2:
            raise LabError(f"{self.name}: symbols must be at least 2, got {self.symbols}")

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @abstractmethod
    def answer(self, string: Ints) -> Ints:
        """What is to be given back, row by row."""

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        string = dice.integers(0, self.symbols, case.length)
        separator = np.full((len(dice), 1), self.symbols)
        return answered(np.concatenate([string, separator], 1), self.answer(string))


@dataclass(frozen=True)
class Copy(StringTask):
    """The string once more."""

    name: ClassVar[str] = "copy"

    def answer(self, string: Ints) -> Ints:
        return string


@dataclass(frozen=True)
class Reverse(StringTask):
    """The string from its end."""

    name: ClassVar[str] = "reverse"

    def answer(self, string: Ints) -> Ints:
        return string[:, ::-1]


@dataclass(frozen=True)
class Sort(StringTask):
    """The symbols in order, each as often as it came."""

    name: ClassVar[str] = "sort"

    def answer(self, string: Ints) -> Ints:
        return np.sort(string, 1)


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Some symbols among blanks, to be given back in order (Gu and Dao 2023, arXiv 2312.00752).

    The string is followed by one marker for each symbol; at the i-th marker the i-th symbol is predicted, so
    nothing of the answer is ever seen.

    Args:
        length: places of the string. data: those that hold a symbol, at random; the others are blank.
    """

    name: ClassVar[str] = "selective-copy"

    length: int = field(default=128, kw_only=True)
    shortest: int = field(default=32, kw_only=True)
    data: int = 16
    symbols: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data < 1 or self.symbols < 2:
            raise LabError(
                f"selective-copy: data must be at least 1 and symbols 2, got {self.data} and {self.symbols}"
            )

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
