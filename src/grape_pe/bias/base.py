"""`Bias`, the base class of all biases; `NoBias`; and the checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..precision import working_dtype

LogitFunction = Callable[[slice, slice], Tensor]


class Bias:
    """Base class of all biases. Use one of its kinds in `grape_pe.bias`."""

    def tile(self, rows: slice, cols: slice) -> Tensor | None:
        """Compute b[rows, cols], (B|1, H|1, rows, cols). None means zero."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def row(self, keys: int) -> Tensor | None:
        """Compute the bias of a single query after all its `keys`: (B|1, H|1, 1, keys)."""
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
        """Return a copy with some of the query-side or key-side tensors replaced."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def dense(self) -> Tensor | None:
        """Compute the whole Tq x Tk bias, for inspection. `attend` computes it by tiles."""
        return self.tile(slice(0, self.query_length or 0), slice(0, self.key_length or 0))

    @property
    def query_length(self) -> int | None:
        """Tq, or None if the bias fits any number of queries."""
        return _length(self.query_tensors())

    @property
    def key_length(self) -> int | None:
        """Tk, or None if the bias fits any number of keys."""
        return _length(self.key_tensors())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise a ValueError, naming the tensor, unless the bias fits attention of this shape."""
        check_lengths(self.query_length, self.key_length, queries, keys)

    def queries(self, rows: slice) -> Self:
        """Keep the last queries, `rows`. For any other part use `tile`: the last query is aligned with the last key."""
        length = self.query_length
        check_tail("queries", rows, length)
        return self.replaced(
            {n: t[:, :, rows] for n, t in self.query_tensors().items() if t.shape[2] == length}
        )

    def keys(self, cols: slice) -> Self:
        """Keep the last keys, `cols`. The result is exact: key-side tensors do not depend on earlier keys."""
        check_tail("keys", cols, self.key_length)
        return self.replaced({name: tensor[:, :, cols] for name, tensor in self.key_tensors().items()})

    def extend(self, later: Bias) -> Self:
        """Join the keys of this bias and those of `later`, for the queries of `later`."""
        ours, theirs = self.key_tensors(), later.key_tensors()
        if type(later) is not type(self) or ours.keys() != theirs.keys():
            raise TypeError(
                f"a {type(self).__name__} with {list(ours)} can only be extended by the same kind, "
                f"got {type(later).__name__} with {list(theirs)}"
            )
        return later.replaced({name: join(tensor, theirs[name]) for name, tensor in ours.items()})  # type: ignore[return-value]

    def rebased(self, offset: float) -> Self:
        """Return the bias with all key positions smaller by `offset`, or raise a ValueError if it has no such shift."""
        raise ValueError(
            f"{type(self).__name__} does not define a position shift, so cached keys cannot be moved; "
            "keep the positions as they are"
        )

    def at_scale(self, scale: float) -> Self:
        """Return the bias for attention with this scale of <q, k>. `attend` calls it before `tile`."""
        return self

    def with_gain(self, gain: float) -> Self:
        """Return the bias with `TileBias.gain` set; other kinds do not change."""
        return self

    def logits(self) -> LogitFunction | None:
        """A function of (rows, cols) that returns scale <q, k> + b, if it is cheaper than b alone; else None.

        `attend` calls this once, so work that all tiles share belongs here.
        """
        return None

    def settled(self, last: int) -> Self:
        """Return an equal bias for queries after all these keys that costs less for each query.

        The cache calls it from time to time on its keys, before new tokens come.

        Args:
            last: number of last keys whose tensors must not change.
        """
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply `change` to every tensor: to move, cast or select along the batch."""
        return self.replaced({n: change(t) for n, t in self.tensors().items()})

    def __add__(self, other: Bias) -> Bias:
        from .sum import added  # which needs this module

        return added(self, other)


def _length(tensors: Mapping[str, Tensor]) -> int | None:
    """Tokens along the third axis. Size 1 broadcasts to any number of tokens but 0."""
    sizes = [tensor.shape[2] for tensor in tensors.values()]
    return (0 if 0 in sizes else max(sizes)) if sizes else None


def check_lengths(query_length: int | None, key_length: int | None, queries: int, keys: int) -> None:
    """Raise a ValueError unless the lengths of a bias (None: any) are the numbers of queries and keys."""
    for what, have, want in (("queries", query_length, queries), ("keys", key_length, keys)):
        if have is not None and have != want:
            raise ValueError(
                f"the bias is for {have} {what}, but attention has {want}; "
                "use bias.queries(…), bias.keys(…) or past.extend(bias) to fit it"
            )


def check_tensor(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise a ValueError unless each axis has one of the one or two sizes `allowed` for it."""
    shape = tensor.shape
    fits = len(shape) == len(allowed)
    for n, sizes in zip(shape, allowed, strict=False):
        # torch.compile can trace `==` of symbolic sizes, but not `in`
        fits = fits and (n == sizes[0] or n == sizes[-1])
    if not fits:
        wanted = ", ".join(" or ".join(map(str, sorted(set(sizes)))) for sizes in allowed)
        raise ValueError(f"{name} of the bias must have shape ({wanted}), got {tuple(tensor.shape)}")


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
    """Raise a ValueError unless the slice keeps the last queries or keys."""
    if length is not None and (part.stop not in (None, length) or part.step not in (None, 1)):
        raise ValueError(
            f"only the last {what} can be kept (the last query is aligned with the last key): the slice must end "
            f"at {length}, got {part}; use tile(rows, cols) for any other part"
        )


def of_rows(x: Tensor, rows: slice) -> Tensor:
    """Select queries of a (B|1, H|1, T|1, …) tensor; a size of 1 stays."""
    return x if x.shape[2] == 1 else x[:, :, rows]


def wide(rate: Tensor) -> Tensor:
    """Cast to at least float32: bfloat16 rounds a distance of 1000 by up to 4."""
    return rate.to(working_dtype(rate.dtype))


def join(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate along tokens. Batch and head axes of size 1 are expanded to those of the other tensor."""
    lead = torch.broadcast_shapes(first.shape[:2], second.shape[:2])
    return torch.cat([t.expand(*lead, *t.shape[2:]) for t in (first, second)], 2)


@dataclass(frozen=True, eq=False)
class NoBias(Bias):
    """The bias 0, of NoPE and all rotations."""

    def tile(self, rows: slice, cols: slice) -> None:
        return None

    def replaced(self, tensors: Mapping[str, Tensor]) -> NoBias:
        return self

    def rebased(self, offset: float) -> NoBias:
        return self


NO_BIAS = NoBias()  # a global, because torch.compile cannot trace NoBias()
