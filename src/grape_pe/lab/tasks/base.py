"""What a probe is: how its rows are made, at which lengths it is learned and tested, and what chance gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np

from ...models.loss import IGNORE
from ..errors import LabError
from .dice import Dice, Ints

TRAIN = "train"
FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A cell of a test: the distribution of its rows, their length and, if it matters, a depth in 0 … 1."""

    split: str
    length: int
    depth: float | None = None


@dataclass(frozen=True)
class Task(ABC):
    """A problem with one right answer, of any length.

    Args:
        length: the longest in training. What a length counts is each task's own (see docs/tasks.md).
        shortest: the shortest in training; lengths between are as likely. 0 for `length` alone.
    """

    name: ClassVar[str]
    #: the test's distributions; the first is that of training
    splits: ClassVar[tuple[str, ...]] = ("test",)
    depths: ClassVar[tuple[float | None, ...]] = (None,)
    #: lengths are multiples of this
    step: ClassVar[int] = 1

    length: int = field(default=64, kw_only=True)
    shortest: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, wanted = self.__dict__[each.name], type(each.default)
            if not (type(value) is wanted or (wanted is float and type(value) is int)):
                raise LabError(f"{self.name}: {each.name} must be {wanted.__name__}, got {value!r}")
        least = self.shortest or self.length
        self.check_length(least)
        self.check_length(self.length)
        if least > self.length:
            raise LabError(f"{self.name}: shortest must not exceed length, got {least} and {self.length}")

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are 0 … vocab_size - 1."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """How many of the answer's tokens a guess among the possible ones gets right."""

    @abstractmethod
    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        """Tokens and targets, (rows, T) each; the target at t is known from the tokens up to t, or -100."""

    def smallest(self) -> int:
        """The shortest length the definition allows."""
        return self.step

    def check_length(self, length: int) -> None:
        if length < self.smallest() or length % self.step:
            multiple = f" and a multiple of {self.step}" if self.step > 1 else ""
            raise LabError(
                f"{self.name}: a length must be at least {self.smallest()}{multiple}, got {length}"
            )

    def check_case(self, case: Case) -> None:
        if case.split not in (TRAIN, *self.splits):
            raise LabError(f"{self.name} has the splits {', '.join(self.splits)}; got {case.split!r}")
        self.check_length(case.length)

    def train_lengths(self) -> range:
        return range(self.shortest or self.length, self.length + 1, self.step)

    def test_lengths(self) -> tuple[int, ...]:
        return tuple(factor * self.length for factor in FACTORS)

    def cases(self, lengths: Iterable[int] | None = None) -> list[Case]:
        """Every cell of the test."""
        chosen = self.test_lengths() if lengths is None else tuple(lengths)
        return [Case(s, n, d) for s in self.splits for n in chosen for d in self.depths]


def unanswered(tokens: Ints) -> Ints:
    """Targets for these tokens with nothing to predict yet."""
    return np.full_like(tokens, IGNORE)


def answered(question: Ints, answer: Ints) -> tuple[Ints, Ints]:
    """The question, then the answer, each of whose tokens is predicted from all before it."""
    tokens = np.concatenate([question, answer[:, :-1]], 1)
    targets = unanswered(tokens)
    targets[:, question.shape[1] - 1 :] = answer
    return tokens, targets
