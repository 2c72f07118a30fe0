"""Word problems: products of group elements (Merrill et al. 2024, arXiv 2404.08819)."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from itertools import combinations, permutations
from typing import ClassVar

import numpy as np

from ..config import Natural, Positive
from .base import Case, Task
from .dice import Dice, Ints

Permutation = tuple[int, ...]


class WordProblem(Task):
    """Uniform elements of a group; the target after each is the product g_t … g_2 g_1 of all so far.

    Args:
        length: elements.
    """

    length: Positive = 32
    shortest: Natural = 4

    @classmethod
    @abstractmethod
    def elements(cls) -> list[Permutation]:
        """The group as permutations; the identity is the first."""

    @property
    def vocab_size(self) -> int:
        return len(self.elements())

    @property
    def chance(self) -> float:
        return 1 / self.vocab_size

    def sample(self, dice: Dice, case: Case) -> tuple[Ints, Ints]:
        self.check_case(case)
        tokens, products = dice.integers(0, self.vocab_size, case.length), multiplication(type(self))
        targets, state = np.empty_like(tokens), np.zeros(len(dice), dtype=np.int64)
        for t in range(case.length):
            state = products[tokens[:, t], state]
            targets[:, t] = state
        return tokens, targets


@cache
def multiplication(group: type[WordProblem]) -> Ints:
    """Table of "first b, then a" at [a, b]."""
    elements = group.elements()
    number = {element: i for i, element in enumerate(elements)}
    return np.array([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])


class Parity(WordProblem):
    """The group of two elements: whether the number of ones so far is even or odd."""

    name: ClassVar[str] = "parity"

    @classmethod
    def elements(cls) -> list[Permutation]:
        return list(permutations(range(2)))


class A5(WordProblem):
    """The 60 even permutations of five things: the smallest group that is not solvable."""

    name: ClassVar[str] = "a5"

    @classmethod
    def elements(cls) -> list[Permutation]:
        return [p for p in permutations(range(5)) if sum(a > b for a, b in combinations(p, 2)) % 2 == 0]


class S5(WordProblem):
    """All 120 permutations of five things."""

    name: ClassVar[str] = "s5"

    @classmethod
    def elements(cls) -> list[Permutation]:
        return list(permutations(range(5)))
