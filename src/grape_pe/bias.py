"""How two tokens' traces make an additive logit: a closed set of frozen dataclasses.

Letters: B batch, H query heads, T tokens (Tq queries, Tk keys), P probe features. Every kind

- makes any tile b[rows, cols] (`tile`), which is all the reference attention needs;
- can be cut along queries (`queries`) and keys (`keys`), and continued along keys (`extend`),
  which is all a cache needs;
- adds to any other (`+`).

When Tq < Tk the last query stands at the last key, so query row r is the token r + Tk - Tq.
A bias is never scaled by 1/sqrt(D), and non-positive wherever rates are non-negative and j <= t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

Link = Literal["logsigmoid", "bounded"]
TileFunction = Callable[[slice, slice, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]

# Links g of Eq. P1: increasing, 1-Lipschitz, below 0. "bounded" is sigmoid - 1, so an edge costs at
# most its rate.
LINKS: dict[Link, Callable[[Tensor], Tensor]] = {
    "logsigmoid": F.logsigmoid,
    "bounded": lambda z: -torch.sigmoid(-z),
}


class Bias:
    """Base of the closed set. A kind overrides `tile` and says which tensors run along what."""

    #: names of the tensors with a query axis and with a key axis (both the third: B, H, T, …)
    query_side: tuple[str, ...] = ()
    key_side: tuple[str, ...] = ()

    def tile(self, rows: slice, cols: slice) -> Tensor | None:
        """b[rows, cols] as (B or 1, H or 1, rows, cols); None stands for zero."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def dense(self) -> Tensor | None:
        """The whole Tq x Tk bias: for looking at, never for computing with."""
        return self.tile(slice(0, self.query_length or 0), slice(0, self.key_length or 0))

    @property
    def query_length(self) -> int | None:
        """Tq, or None when the bias fits any length."""
        return self._length(self.query_side)

    @property
    def key_length(self) -> int | None:
        return self._length(self.key_side)

    def _length(self, names: tuple[str, ...]) -> int | None:
        sizes = {getattr(self, name).shape[2] for name in names if getattr(self, name) is not None}
        return max(sizes, default=None)

    def queries(self, rows: slice) -> Self:
        return self._cut(self.query_side, rows)

    def keys(self, cols: slice) -> Self:
        """Drop keys. Exact: what a key leaves behind does not depend on the keys before it."""
        return self._cut(self.key_side, cols)

    def _cut(self, names: tuple[str, ...], part: slice) -> Self:
        changed = {
            name: value[:, :, part]
            for name in names
            if (value := getattr(self, name)) is not None and value.shape[2] != 1
        }
        return replace(self, **changed)  # type: ignore[type-var]

    def extend(self, later: Bias) -> Self:
        """This bias's keys followed by those of `later`, seen by the queries of `later`."""
        if type(later) is not type(self):
            raise TypeError(
                f"a {type(self).__name__} can only be extended by another, got {type(later).__name__}"
            )
        joined = {}
        for name in self.key_side:
            ours, theirs = getattr(self, name), getattr(later, name)
            joined[name] = None if ours is None else torch.cat([ours, theirs], 2)
        return replace(later, **joined)  # type: ignore[type-var, return-value]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same bias with every tensor changed: moves, casts, batch selection."""
        changed = {
            f.name: change(value)
            for f in fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)  # type: ignore[type-var]

    def __add__(self, other: Bias) -> Bias:
        return _sum([*_parts(self), *_parts(other)])


def _parts(bias: Bias) -> tuple[Bias, ...]:
    return bias.parts if isinstance(bias, SumBias) else (bias,)


def _sum(parts: list[Bias]) -> Bias:
    """Slope terms concatenate, zeros vanish, the rest is kept side by side."""
    terms = tuple(term for part in parts if isinstance(part, SlopeBias) for term in part.terms)
    slopes: list[Bias] = [SlopeBias(terms)] if terms else []
    others = [part for part in parts if not isinstance(part, (SlopeBias, NoBias))]
    kept = [*slopes, *others]
    if not kept:
        return NoBias()
    return kept[0] if len(kept) == 1 else SumBias(tuple(kept))


@dataclass(frozen=True, eq=False)
class NoBias(Bias):
    """Zero: NoPE and every pure rotation."""

    def tile(self, rows: slice, cols: slice) -> None:
        return None


@dataclass(frozen=True, eq=False)
class SlopeTerm(Bias):
    """(rate_q[t] + rate_k[j]) * (c[j] - c[t]), one term of a `SlopeBias` (Eq. A5).

    `c_q` (B|1, H|1, Tq) and `c_k` (B|1, H|1, Tk) are the same coordinate seen from both sides, in
    float64 where it grows with the sequence; `rate_q` (B|1, H, Tq|1) and `rate_k` (B|1, H, Tk) may
    be None for zero. The difference is taken before the product, so nothing cancels at long range.
    """

    c_q: Tensor
    c_k: Tensor
    rate_q: Tensor | None = None
    rate_k: Tensor | None = None

    query_side = ("c_q", "rate_q")
    key_side = ("c_k", "rate_k")

    def __post_init__(self) -> None:
        if self.rate_q is None and self.rate_k is None:
            raise ValueError("a SlopeTerm needs rate_q or rate_k (None means zero); got neither")

    def tile(self, rows: slice, cols: slice) -> Tensor:
        term = self.queries(rows).keys(cols)
        offset = term.c_k.unsqueeze(-2) - term.c_q.unsqueeze(-1)
        rate: Tensor | float = 0.0
        if term.rate_q is not None:
            rate = rate + term.rate_q.unsqueeze(-1)
        if term.rate_k is not None:
            rate = rate + term.rate_k.unsqueeze(-2)
        assert isinstance(rate, Tensor)
        return rate * offset.to(rate.dtype)


@dataclass(frozen=True, eq=False)
class SlopeBias(Bias):
    """A sum of `SlopeTerm`s: ALiBi, FoX, GRAPE-A in all its gated forms, axis-aligned 2D/3D."""

    terms: tuple[SlopeTerm, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a SlopeBias needs at least one SlopeTerm; use NoBias() for zero")

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return sum((term.tile(rows, cols) for term in self.terms[1:]), self.terms[0].tile(rows, cols))

    @property
    def query_length(self) -> int | None:
        return self.terms[0].query_length

    @property
    def key_length(self) -> int | None:
        return self.terms[0].key_length

    def queries(self, rows: slice) -> SlopeBias:
        return SlopeBias(tuple(term.queries(rows) for term in self.terms))

    def keys(self, cols: slice) -> SlopeBias:
        return SlopeBias(tuple(term.keys(cols) for term in self.terms))

    def extend(self, later: Bias) -> SlopeBias:
        if not isinstance(later, SlopeBias) or len(later.terms) != len(self.terms):
            raise TypeError(f"a SlopeBias of {len(self.terms)} terms can only be extended by its like")
        pairs = zip(self.terms, later.terms, strict=True)
        return SlopeBias(tuple(ours.extend(theirs) for ours, theirs in pairs))

    def map(self, change: Callable[[Tensor], Tensor]) -> SlopeBias:
        return SlopeBias(tuple(term.map(change) for term in self.terms))


@dataclass(frozen=True, eq=False)
class PathBias(Bias):
    """sum for l = j+1 … t of rate_h * g(<p_t, P_l> / P): the path integral of GRAPE-AP (Eq. P2).

    `probe_q` (B, Hp, Tq, P) and `probe_k` (B, Hp, Tk, P), the latter rotated on arrival, with Hp a
    divisor of H; `rate` (1, H, 1). The sum runs over tokens, and is empty (zero) for j >= t.
    """

    probe_q: Tensor
    probe_k: Tensor
    rate: Tensor
    link: Link = "logsigmoid"

    query_side = ("probe_q",)
    key_side = ("probe_k",)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        shift = self.probe_k.shape[2] - self.probe_q.shape[2]
        first, last = cols.start + 1, max(rows.stop + shift, cols.stop + 1)
        probes = self.probe_k[:, :, first:last]
        z = self.probe_q[:, :, rows] @ probes.transpose(-1, -2) / self.probe_k.shape[-1]
        token = torch.arange(first, first + probes.shape[2], device=z.device)
        t = torch.arange(rows.start + shift, rows.stop + shift, device=z.device)
        edge = LINKS[self.link](z).masked_fill(token > t.unsqueeze(-1), 0.0)
        # From the right: the sum over l = j+1 … t stands at l = j + 1, which is column j - cols.start.
        total = edge.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
        width = cols.stop - cols.start
        total = F.pad(total[..., :width], (0, max(0, width - total.shape[-1])))
        repeat = self.rate.shape[1] // total.shape[1]
        return self.rate.unsqueeze(-1) * total.to(z.dtype).repeat_interleave(repeat, 1)


@dataclass(frozen=True, eq=False)
class TileBias(Bias):
    """Any function of a tile, given features of tokens: radial distance, PaTH, a user's own.

    `function(rows, cols, query, key)` gets the whole feature tensors, each (B|1, H|1, T, …), and
    returns (B|1, H|1, rows, cols). It must be differentiable torch code.
    """

    function: TileFunction
    query: Mapping[str, Tensor]
    key: Mapping[str, Tensor]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self.function(rows, cols, self.query, self.key)

    @property
    def query_length(self) -> int | None:
        return max((value.shape[2] for value in self.query.values()), default=None)

    @property
    def key_length(self) -> int | None:
        return max((value.shape[2] for value in self.key.values()), default=None)

    def queries(self, rows: slice) -> TileBias:
        return replace(self, query={name: value[:, :, rows] for name, value in self.query.items()})

    def keys(self, cols: slice) -> TileBias:
        return replace(self, key={name: value[:, :, cols] for name, value in self.key.items()})

    def extend(self, later: Bias) -> TileBias:
        if not isinstance(later, TileBias) or later.key.keys() != self.key.keys():
            raise TypeError("a TileBias can only be extended by one with the same features")
        joined = {name: torch.cat([value, later.key[name]], 2) for name, value in self.key.items()}
        return replace(later, key=joined)

    def map(self, change: Callable[[Tensor], Tensor]) -> TileBias:
        query = {name: change(value) for name, value in self.query.items()}
        return replace(self, query=query, key={name: change(v) for name, v in self.key.items()})


@dataclass(frozen=True, eq=False)
class SumBias(Bias):
    """Biases of different kinds, added. Made by `+`, which merges what can be merged."""

    parts: tuple[Bias, ...]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        tiles: list[Any] = [part.tile(rows, cols) for part in self.parts]
        return sum(tiles[1:], tiles[0])

    @property
    def query_length(self) -> int | None:
        return self.parts[0].query_length

    @property
    def key_length(self) -> int | None:
        return self.parts[0].key_length

    def queries(self, rows: slice) -> SumBias:
        return SumBias(tuple(part.queries(rows) for part in self.parts))

    def keys(self, cols: slice) -> SumBias:
        return SumBias(tuple(part.keys(cols) for part in self.parts))

    def extend(self, later: Bias) -> SumBias:
        if not isinstance(later, SumBias) or len(later.parts) != len(self.parts):
            raise TypeError(f"a SumBias of {len(self.parts)} parts can only be extended by its like")
        pairs = zip(self.parts, later.parts, strict=True)
        return SumBias(tuple(ours.extend(theirs) for ours, theirs in pairs))

    def map(self, change: Callable[[Tensor], Tensor]) -> SumBias:
        return SumBias(tuple(part.map(change) for part in self.parts))
