"""Biases that depend on the distance alone, up to weights of the query: `DistanceBias`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..precision import readable
from .base import Bias, check_lengths, check_tail, check_tensor, of_rows, wide

Beyond = Literal["last", "zero", "-inf"]
BEYOND: tuple[Beyond, ...] = ("last", "zero", "-inf")
#: distances (whole numbers, any shape S) and numbers (H|1, R, N) -> values (H|1, R, *S)
Profile = Callable[[Tensor, Tensor], Tensor]
#: distances that `resolved` makes a table of: beyond this it would not be small beside the keys
LONGEST = 1 << 22


@dataclass(frozen=True, eq=False)
class DistanceBias(Bias):
    """R tables read at the distance n_t - n_j and mixed by weights of the query (Eq. D1).

    b(t, j) = sum over r of w_r(t) * P_r[n_t - n_j]

    Args:
        position_q: (B|1, 1, Tq) whole numbers n.
        position_k: (B|1, 1, Tk) whole numbers n; only these are cached.
        table: (1, H|1, 1, R, L), P at the distances `first` … `first + L - 1`, which must include 0. With a
            `profile`: its numbers, such as buckets or exponents.
        weight: (B|1, H|1, Tq, R), mixes the R tables for each query; without it they are added.
        first: the smallest distance in the table.
        beyond: what is used at any other distance, on both sides of the table: "last" (the nearest entry),
            "zero", or "-inf" (such keys are not seen).
        profile: computes the values at every distance as `profile(distances, numbers)`; `first` and
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
                "table of a DistanceBias must be (1, H|1, 1, R, L): heads, mixed tables, distances; "
                f"got {tuple(self.table.shape)}"
            )
        if self.beyond not in BEYOND:
            raise ValueError(f"beyond must be one of {', '.join(BEYOND)}, got {self.beyond!r}")
        if self.profile is None and not -self.table.shape[-1] < self.first <= 0:
            raise ValueError(
                f"a table of {self.table.shape[-1]} distances must include distance 0, "
                f"but its first is {self.first}"
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
                f"a DistanceBias has values for whole distances only and cannot be moved by {offset}"
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
        apart = self.position_q[:, 0, rows].unsqueeze(-1) - self.position_k[:, 0, cols].unsqueeze(-2)
        values = self._values(apart.round().long())  # (H|1, R, B|1, rows, cols)
        if self.weight is None:
            total = values.sum(1)
        else:
            mix = wide(of_rows(self.weight, rows)).permute(1, 3, 0, 2)  # (H|1, R, B|1, rows)
            total = (mix.unsqueeze(-1) * values).sum(1)
        return self._outside(apart, total).transpose(0, 1)

    def _values(self, apart: Tensor) -> Tensor:
        table = wide(self.table[0, :, 0])
        if self.profile is not None:
            return self.profile(apart, table)
        return table[..., (apart - self.first).clamp(0, table.shape[-1] - 1)]

    def _outside(self, apart: Tensor, total: Tensor) -> Tensor:
        if self.profile is not None or self.beyond == "last":
            return total
        inside = (apart >= self.first) & (apart < self.first + self.table.shape[-1])
        return total.where(inside, 0.0 if self.beyond == "zero" else float("-inf"))

    def span(self) -> tuple[int, int] | None:
        """The smallest and largest distance in any sequence; None where the positions cannot be read."""
        positions = self.position_q, self.position_k
        if not all(readable(x) for x in positions):
            return None
        if any(x.numel() == 0 for x in positions):
            return 0, 0
        (low_q, high_q), (low_k, high_k) = (x.aminmax(dim=-1) for x in positions)
        ends = torch.stack([(low_q - high_k).min(), (high_q - low_k).max()])  # read from a GPU at once
        low, high = map(int, ends.tolist())
        return low, high

    def why_not_resolved(self) -> str | None:
        """Why there is no table of all distances, or None where there is one."""
        if self.profile is None:
            return None
        span = self.span()
        if span is None:
            return "it reads a table of all distances, and positions cannot be read here (torch.compile, CUDA graph)"
        if span[1] - span[0] >= LONGEST:
            return f"its table would hold {span[1] - span[0] + 1} distances, more than {LONGEST}"
        return None

    def resolved(self) -> DistanceBias:
        """The same with a table of all distances in place of the profile. For kernels."""
        if self.profile is None:
            return self
        span = self.span()
        assert span is not None
        low, high = min(span[0], 0), max(span[1], 0)
        distances = torch.arange(low, high + 1, device=self.table.device)
        table = self.profile(distances, wide(self.table[0, :, 0]))[None, :, None]
        return replace(self, table=table, first=low, beyond="last", profile=None)
