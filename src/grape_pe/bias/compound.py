"""`Compound`, the base class of `SlopeBias` and `SumBias`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor

from .base import Bias


def plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two tensors, where None means zero."""
    return second if first is None else first if second is None else first + second


class Compound(Bias):
    """A sum of biases, whose tensors are named "0.c_q", "1.probe_k" and so on."""

    def members(self) -> tuple[Any, ...]:
        """The biases that are added."""
        raise NotImplementedError

    def changed(self, change: Callable[[int, Any], Bias]) -> Self:
        """Return a copy with every member replaced by `change(index, member)`."""
        return type(self)(tuple(change(i, part) for i, part in enumerate(self.members())))  # type: ignore[call-arg]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        total = None
        for (
            part
        ) in self.members():  # in a comprehension torch.compile would specialize on the lengths of slices
            total = plus(total, part.tile(rows, cols))
        return total  # type: ignore[return-value]  # a compound has members, and none of them is NoBias

    def row(self, keys: int) -> Tensor:
        total = None
        for part in self.members():
            total = plus(total, part.row(keys))
        return total  # type: ignore[return-value]

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        for part in self.members():
            part.check(batch, heads, queries, keys)

    def query_tensors(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": x
            for i, part in enumerate(self.members())
            for name, x in part.query_tensors().items()
        }

    def key_tensors(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": x
            for i, part in enumerate(self.members())
            for name, x in part.key_tensors().items()
        }

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        split: list[dict[str, Tensor]] = [{} for _ in self.members()]
        for name, tensor in tensors.items():
            index, _, rest = name.partition(".")
            split[int(index)][rest] = tensor
        return self.changed(lambda i, part: part.replaced(split[i]))

    def rebased(self, offset: float) -> Self:
        return self.changed(lambda i, part: part.rebased(offset))
