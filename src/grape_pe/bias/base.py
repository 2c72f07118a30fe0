"""The abstract `Bias`, its checks, and `NoBias`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..precision import working_dtype

LogitFunction = Callable[[slice, slice], Tensor]


class Bias:
    """Base of the closed set: a kind makes tiles and says which tensors run along queries and keys."""

    def tile(self, rows: slice, cols: slice) -> Tensor | None:
        """b[rows, cols] as (B or 1, H or 1, rows, cols); None stands for zero."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def row(self, keys: int) -> Tensor | None:
        """The tile of a single query and all its `keys`: (B|1, H|1, 1, keys)."""
        return self.tile(slice(0, 1), slice(0, keys))

    def query_tensors(self) -> dict[str, Tensor]:
        """Query-side tensors, by name: (B|1, H|1, Tq|1, …)."""
        return {}

    def key_tensors(self) -> dict[str, Tensor]:
        """Key-side tensors to cache, by name: (B|1, H|1, Tk, …)."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Query-side and key-side tensors, by name."""
        return self.query_tensors() | self.key_tensors()

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same bias with some of its query-side or key-side tensors replaced."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def dense(self) -> Tensor | None:
        """The whole Tq x Tk bias: for looking at, never for computing with."""
        return self.tile(slice(0, self.query_length or 0), slice(0, self.key_length or 0))

    @property
    def query_length(self) -> int | None:
        """Tq, or None when the bias fits any length."""
        return _length(self.query_tensors())

    @property
    def key_length(self) -> int | None:
        return _length(self.key_tensors())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise a ValueError, saying which tensor, unless the bias belongs to attention of that shape."""
        check_lengths(self.query_length, self.key_length, queries, keys)

    def queries(self, rows: slice) -> Self:
        """Keep the last queries. Any other part would not stand at the last key: make a `tile` of it."""
        length = self.query_length
        check_tail("queries", rows, length)
        return self.replaced(
            {n: t[:, :, rows] for n, t in self.query_tensors().items() if t.shape[2] == length}
        )

    def keys(self, cols: slice) -> Self:
        """Drop the oldest keys. Exact: the key-side tensors of a key do not depend on the keys before it."""
        check_tail("keys", cols, self.key_length)
        return self.replaced({name: tensor[:, :, cols] for name, tensor in self.key_tensors().items()})

    def extend(self, later: Bias) -> Self:
        """This bias's keys followed by those of `later`, seen by the queries of `later`."""
        ours, theirs = self.key_tensors(), later.key_tensors()
        if type(later) is not type(self) or ours.keys() != theirs.keys():
            raise TypeError(
                f"a {type(self).__name__} with {list(ours)} can only be extended by the same kind, "
                f"got {type(later).__name__} with {list(theirs)}"
            )
        return later.replaced({name: join(tensor, theirs[name]) for name, tensor in ours.items()})  # type: ignore[return-value]

    def rebased(self, offset: float) -> Self:
        """The same bias with all positions smaller by `offset`.

        Exact by the group law where there is one; a kind that cannot raises a ValueError.
        """
        raise ValueError(
            f"{type(self).__name__} does not define a position shift, so cached keys cannot be moved; "
            "keep the positions as they are"
        )

    def at_scale(self, scale: float) -> Self:
        """The same bias in attention with this scale of <q, k>; `attend` asks for it before any `tile`."""
        return self

    def with_gain(self, gain: float) -> Self:
        """The same bias where `attend` scales <q, k> by 1/gain of what products of this bias's own q and k need."""
        return self

    def logits(self) -> LogitFunction | None:
        """A function of (rows, cols) that returns scale <q, k> + b, if that costs less than b alone; else None.

        What all tiles share is computed here, once for a call of attention.
        """
        return None

    def settled(self, last: int) -> Self:
        """The same for queries after all these keys, at less cost a query; the `last` keys stay as they are.

        A cache calls it now and then with what it holds, before new tokens come.
        """
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same bias with every tensor changed: moves, casts, batch selection."""
        return self.replaced({n: change(t) for n, t in self.tensors().items()})

    def __add__(self, other: Bias) -> Bias:
        from .sum import added  # which needs this module

        return added(self, other)


def _length(tensors: Mapping[str, Tensor]) -> int | None:
    """Tokens along the third axis; one stands for any number of them, except none."""
    sizes = [tensor.shape[2] for tensor in tensors.values()]
    return (0 if 0 in sizes else max(sizes)) if sizes else None


def check_lengths(query_length: int | None, key_length: int | None, queries: int, keys: int) -> None:
    for what, have, want in (("queries", query_length, queries), ("keys", key_length, keys)):
        if have is not None and have != want:
            raise ValueError(
                f"the bias was made for {have} {what} but there are {want}; "
                "use bias.queries(…), bias.keys(…) or past.extend(bias) to fit it"
            )


def check_tensor(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    """Each axis must have one of the one or two sizes allowed for it."""
    shape = tensor.shape
    fits = len(shape) == len(allowed)
    for n, sizes in zip(shape, allowed, strict=False):
        # torch.compile traces `==` of symbols, but not `in`
        fits = fits and (n == sizes[0] or n == sizes[-1])
    if not fits:
        wanted = ", ".join(" or ".join(map(str, sorted(set(sizes)))) for sizes in allowed)
        raise ValueError(f"{name} of the bias must be of shape ({wanted}), got {tuple(tensor.shape)}")


def check_tile(tile: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A tile must broadcast to the logits (B, H, rows, cols) it is added to."""
    fits = tile.dim() == 4
    for n, size in zip(tile.shape, shape, strict=False):
        fits = fits and (n == 1 or n == size)
    if not fits:
        raise ValueError(
            f"the bias must broadcast to (B, H, Tq, Tk) = {tuple(shape)}, but its shape is {tuple(tile.shape)}"
        )
    if tile.device != device:
        raise ValueError(f"the bias is computed on {tile.device} but q is on {device}; move one of them")


def check_tail(what: str, part: slice, length: int | None) -> None:
    if length is not None and (part.stop not in (None, length) or part.step not in (None, 1)):
        raise ValueError(
            f"only the last {what} can be kept (the last query stands at the last key): the slice must end "
            f"at {length}, got {part}; use tile(rows, cols) for any other part"
        )


def of_rows(x: Tensor, rows: slice) -> Tensor:
    """(B|1, H|1, T|1) at these queries."""
    return x if x.shape[2] == 1 else x[:, :, rows]


def wide(rate: Tensor) -> Tensor:
    """At least float32: a distance of 1000 is rounded by up to 4 in bfloat16."""
    return rate.to(working_dtype(rate.dtype))


def join(first: Tensor, second: Tensor) -> Tensor:
    """Along tokens; a tensor shared by the batch or the heads is expanded when the other is not."""
    lead = torch.broadcast_shapes(first.shape[:2], second.shape[:2])
    return torch.cat([t.expand(*lead, *t.shape[2:]) for t in (first, second)], 2)


@dataclass(frozen=True, eq=False)
class NoBias(Bias):
    """Zero: NoPE and every pure rotation."""

    def tile(self, rows: slice, cols: slice) -> None:
        return None

    def replaced(self, tensors: Mapping[str, Tensor]) -> NoBias:
        return self

    def rebased(self, offset: float) -> NoBias:
        return self


NO_BIAS = NoBias()  # a global, because torch.compile can trace neither NoBias() nor a default of it
