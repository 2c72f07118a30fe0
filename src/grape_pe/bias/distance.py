"""`DistanceBias`, a table of values over distances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice
from ..precision import readable
from .base import Bias, check_lengths, check_tail, check_tensor, of_rows, wide

Beyond = Literal["last", "zero", "-inf"]
BEYOND: tuple[Beyond, ...] = ("last", "zero", "-inf")
#: (distances, integers of any shape S; parameters (H|1, R, N)) -> values (H|1, R, *S)
Profile = Callable[[Tensor, Tensor], Tensor]
#: `resolved` makes a table of fewer distances than this; a longer one would need more memory than the keys
LONGEST = 1 << 22


@dataclass(frozen=True, eq=False)
class DistanceBias(Bias):
    """R tables over distances, read at n_t - n_j and mixed by weights of the query (Eq. D1).

    b(t, j) = sum over r of w_r(t) * P_r[n_t - n_j]

    Args:
        position_q: (B|1, 1, Tq), positions n of the queries, whole numbers.
        position_k: (B|1, 1, Tk), positions n of the keys, whole numbers.
        table: (1, H|1, 1, R, L), P at the distances `first` … `first + L - 1`, which must include 0. With a
            `profile`: the parameters of the profile, such as exponents.
        weight: (B|1, H|1, Tq, R), weights of the tables for each query; None adds the tables.
        first: the smallest distance in the table.
        beyond: the value at distances outside the table: "last" (the nearest entry), "zero", or "-inf" (such keys
            are masked).
        profile: a function `profile(distances, table)` that computes the values at any distance; `first` and
            `beyond` are then not used.
    """

    position_q: Tensor
    position_k: Tensor
    table: Tensor
    weight: Tensor | None = None
    first: int = 0
    beyond: Beyond = "last"
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.table.dim() != 5 or self.table.shape[0] != 1 or self.table.shape[2] != 1:
            raise ValueError(
                "table of a DistanceBias must have shape (1, H|1, 1, R, L), with H heads, R tables and L distances, "
                f"got {tuple(self.table.shape)}"
            )
        check_choice("beyond", self.beyond, BEYOND)
        if self.profile is None and not -self.table.shape[-1] < self.first <= 0:
            raise ValueError(
                f"the table of a DistanceBias must include distance 0: first must be between "
                f"{1 - self.table.shape[-1]} and 0 for a table of {self.table.shape[-1]} distances, got {self.first}"
            )

    def query_tensors(self) -> dict[str, Tensor]:
        given = {"position_q": self.position_q, "table": self.table}
        return given if self.weight is None else given | {"weight": self.weight}

    def key_tensors(self) -> dict[str, Tensor]:
        return {"position_k": self.position_k}

    def replaced(self, tensors: Mapping[str, Tensor]) -> DistanceBias:
        return replace(self, **tensors)  # type: ignore[arg-type]

    def queries(self, rows: slice) -> DistanceBias:
        check_tail("queries", rows, self.query_length)
        weight = None if self.weight is None else of_rows(self.weight, rows)
        return replace(self, position_q=self.position_q[:, :, rows], weight=weight)

    def rebased(self, offset: float) -> DistanceBias:
        if offset != int(offset):
            raise ValueError(
                f"a DistanceBias can only be shifted by a whole number, got {offset}; its table has no other distances"
            )
        return replace(self, position_k=self.position_k - offset)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_lengths(self.position_q.shape[2], self.position_k.shape[2], queries, keys)
        check_tensor("position_q", self.position_q, (1, batch), (1,), (queries,))
        check_tensor("position_k", self.position_k, (1, batch), (1,), (keys,))
        tables = self.table.shape[3:]
        check_tensor("table", self.table, (1,), (1, heads), (1,), *((size,) for size in tables))
        if self.weight is not None:
            check_tensor("weight", self.weight, (1, batch), (1, heads), (1, queries), (tables[0],))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        distance = self.position_q[:, 0, rows].unsqueeze(-1) - self.position_k[:, 0, cols].unsqueeze(-2)
        values = self._values(distance.round().long())  # (H|1, R, B|1, rows, cols)
        if self.weight is None:
            total = values.sum(1)
        else:
            mix = wide(of_rows(self.weight, rows)).permute(1, 3, 0, 2)  # (H|1, R, B|1, rows)
            total = (mix.unsqueeze(-1) * values).sum(1)
        return self._outside(distance, total).transpose(0, 1)

    def _values(self, distance: Tensor) -> Tensor:
        table = wide(self.table[0, :, 0])
        if self.profile is not None:
            return self.profile(distance, table)
        return table[..., (distance - self.first).clamp(0, table.shape[-1] - 1)]

    def _outside(self, distance: Tensor, total: Tensor) -> Tensor:
        if self.profile is not None or self.beyond == "last":
            return total
        inside = (distance >= self.first) & (distance < self.first + self.table.shape[-1])
        return total.where(inside, 0.0 if self.beyond == "zero" else float("-inf"))

    def span(self) -> tuple[int, int] | None:
        """The smallest and largest distance in any sequence; None if positions cannot be read (torch.compile)."""
        positions = self.position_q, self.position_k
        if not all(readable(x) for x in positions):
            return None
        if any(x.numel() == 0 for x in positions):
            return 0, 0
        (low_q, high_q), (low_k, high_k) = (x.aminmax(dim=-1) for x in positions)
        ends = torch.stack([(low_q - high_k).min(), (high_q - low_k).max()])  # one transfer from the GPU
        low, high = map(int, ends.tolist())
        return low, high

    def why_not_resolved(self) -> str | None:
        """Why `resolved` cannot make a table of all distances, or None if it can."""
        if self.profile is None:
            return None
        span = self.span()
        if span is None:
            return "it needs a table of all distances, and positions cannot be read here (torch.compile, CUDA graph)"
        if span[1] - span[0] >= LONGEST:
            return f"its table would have {span[1] - span[0] + 1} distances, more than {LONGEST}"
        return None

    def resolved(self) -> DistanceBias:
        """Replace the profile by a table of all distances, for kernels."""
        if self.profile is None:
            return self
        span = self.span()
        assert span is not None
        low, high = min(span[0], 0), max(span[1], 0)
        distances = torch.arange(low, high + 1, device=self.table.device)
        table = self.profile(distances, wide(self.table[0, :, 0]))[None, :, None]
        return replace(self, table=table, first=low, beyond="last", profile=None)
