"""The interface of a probe: how rows are generated, lengths of training and test, and the score of a guess."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from pydantic import ConfigDict, model_validator

from ...models.loss import IGNORE
from ..config import Natural, Positive, Section
from ..errors import LabError
from .dice import Dice, Ints

TRAIN = "train"
FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A cell of a test: the distribution of its rows, their length and, if it matters, a depth from 0 to 1."""

    split: str
    length: int
    depth: float | None = None


class Task(Section, ABC):
    """A problem with one right answer, of any length.

    Args:
        length: the longest in training. What a length counts depends on the task (see docs/tasks.md).
        shortest: the shortest in training; each length in between is as likely. 0: `length` alone.
    """

    model_config = ConfigDict(strict=True)

    name: ClassVar[str]
    #: the test's distributions; the first is that of training
    splits: ClassVar[tuple[str, ...]] = ("test",)
    depths: ClassVar[tuple[float | None, ...]] = (None,)
    #: lengths are multiples of this
    step: ClassVar[int] = 1

    length: Positive = 64
    shortest: Natural = 0

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        least = self.shortest or self.length
        self.check_length(least)
        self.check_length(self.length)
        if least > self.length:
            raise LabError(f"shortest must not exceed length, got {least} and {self.length}")
        return self

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are 0 … vocab_size - 1."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The share of answer tokens that a guess among the possible ones gets right."""

    @abstractmethod
    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        """Tokens and targets, (rows, T) each; the target at t is known from the tokens up to t, or -100."""

    def smallest(self) -> int:
        """The shortest length the definition allows."""
        return self.step

    def check_length(self, length: int) -> None:
        if length < self.smallest() or length % self.step:
            multiple = f" and a multiple of {self.step}" if self.step > 1 else ""
            raise LabError(f"length must be at least {self.smallest()}{multiple}, got {length}")

    def check_case(self, case: Case) -> None:
        if case.split not in (TRAIN, *self.splits):
            raise LabError(f"{self.name} has the splits {', '.join(self.splits)}, got {case.split!r}")
        self.check_length(case.length)

    def train_lengths(self) -> range:
        return range(self.shortest or self.length, self.length + 1, self.step)

    def cases(self, lengths: Iterable[int] | None = None) -> list[Case]:
        """Every cell of the test."""
        chosen = [factor * self.length for factor in FACTORS] if lengths is None else list(lengths)
        return [Case(s, n, d) for s in self.splits for n in chosen for d in self.depths]


def unanswered(tokens: Ints) -> Ints:
    """Targets for these tokens, all ignored."""
    return np.full_like(tokens, IGNORE)


def answered(question: Ints, answer: Ints) -> tuple[Ints, Ints]:
    """The question, then the answer, each of whose tokens is predicted from all before it."""
    tokens = np.concatenate([question, answer[:, :-1]], 1)
    targets = unanswered(tokens)
    targets[:, question.shape[1] - 1 :] = answer
    return tokens, targets
