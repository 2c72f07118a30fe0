"""Biases linear in an offset: `SlopeTerm` and their sum, `SlopeBias`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from .base import Bias, check_lengths, check_tensor, of_rows, wide
from .compound import Compound


@dataclass(frozen=True, eq=False)
class SlopeTerm(Bias):
    """The bias (rate_q[t] + rate_k[j]) * (c[j] - c[t]), a term of a `SlopeBias` (Eq. A5).

    The difference is computed before the product, so there is no cancellation at long range.

    Args:
        c_q: (B|1, H|1, Tq), the coordinate c of the queries; use float64 if it grows with the sequence.
        c_k: (B|1, H|1, Tk), the same coordinate of the keys.
        rate_q: (B|1, H, Tq|1); None for zero.
        rate_k: (B|1, H, Tk); None for zero.
        coordinate: "positions" if c is a position, "sum" if it is a running sum. A position shift changes only
            the first.
    """

    c_q: Tensor
    c_k: Tensor
    rate_q: Tensor | None = None
    rate_k: Tensor | None = None
    coordinate: Literal["positions", "sum"] = "positions"

    def query_tensors(self) -> dict[str, Tensor]:
        return {"c_q": self.c_q} | ({} if self.rate_q is None else {"rate_q": self.rate_q})

    def key_tensors(self) -> dict[str, Tensor]:
        return {"c_k": self.c_k} | ({} if self.rate_k is None else {"rate_k": self.rate_k})

    def replaced(self, tensors: Mapping[str, Tensor]) -> SlopeTerm:
        get = tensors.get
        rates = get("rate_q", self.rate_q), get("rate_k", self.rate_k)
        return SlopeTerm(get("c_q", self.c_q), get("c_k", self.c_k), *rates, self.coordinate)

    def rebased(self, offset: float) -> SlopeTerm:
        return replace(self, c_k=self.c_k - offset) if self.coordinate == "positions" else self

    def __post_init__(self) -> None:
        if self.rate_q is None and self.rate_k is None:
            raise ValueError("a SlopeTerm needs rate_q or rate_k (None means zero); got neither")

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_lengths(self.c_q.shape[2], self.c_k.shape[2], queries, keys)
        shape = (1, batch), (1, heads)
        check_tensor("c_q", self.c_q, *shape, (queries,))
        check_tensor("c_k", self.c_k, *shape, (keys,))
        if self.rate_q is not None:
            check_tensor("rate_q", self.rate_q, *shape, (1, queries))
        if self.rate_k is not None:
            check_tensor("rate_k", self.rate_k, *shape, (keys,))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        offset = self.c_k[:, :, cols].unsqueeze(-2) - self.c_q[:, :, rows].unsqueeze(-1)
        rate: Tensor | float = 0.0
        if self.rate_q is not None:
            rate = rate + wide(of_rows(self.rate_q, rows)).unsqueeze(-1)
        if self.rate_k is not None:
            rate = rate + wide(self.rate_k[:, :, cols]).unsqueeze(-2)
        assert isinstance(rate, Tensor)
        return rate * offset.to(rate.dtype)

    def row(self, keys: int) -> Tensor:
        rate = self.rate_k if self.rate_q is None else self.rate_q
        assert rate is not None
        rate = wide(rate)
        if self.rate_q is not None and self.rate_k is not None:
            rate = rate + self.rate_k
        return (rate * (self.c_k - self.c_q).to(rate.dtype)).unsqueeze(2)


@dataclass(frozen=True, eq=False)
class SlopeBias(Compound):
    """A sum of `SlopeTerm`s: ALiBi, FoX, all forms of GRAPE-A, slopes along the axes of 2D or 3D positions.

    Args:
        terms: the terms that are added.
    """

    terms: tuple[SlopeTerm, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a SlopeBias needs at least one SlopeTerm; use NoBias() for zero")

    def members(self) -> tuple[SlopeTerm, ...]:
        return self.terms


def terms_of(bias: Bias) -> tuple[SlopeTerm, ...]:
    """The slope terms of a bias that is a SlopeTerm or a SlopeBias; none for other kinds."""
    if isinstance(bias, SlopeTerm):
        return (bias,)
    return bias.terms if isinstance(bias, SlopeBias) else ()
