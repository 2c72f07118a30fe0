"""Exact pruning: which tiles of keys cannot matter, and how much was skipped.

A tile is skipped when an upper bound of all its logits lies `tau` below a lower bound of what each of its
rows holds. `threshold` chooses tau so that everything skipped together is below the rounding of the
result, gradients of rates and coordinates included; docs/attention.md has the proof. The bounds hold for
any sign of rates and offsets, so nothing need be assumed about the encoding.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .surroundings import readable

if TYPE_CHECKING:
    from .problem import AttentionProblem

Prune = float | Literal["auto"] | None

OFF, AUTO = -1.0, 0.0  # how a custom op, which takes only floats, is told


@dataclass
class PruningReport:
    """How many tiles the masks left, and how many of those were computed."""

    visible: int = 0
    computed: int = 0

    @property
    def fraction(self) -> float:
        """The part of the visible tiles that was never computed."""
        return 1.0 - self.computed / self.visible if self.visible else 0.0

    def __str__(self) -> str:
        return f"{self.fraction:.1%} of {self.visible} tiles skipped"


_report: contextvars.ContextVar[PruningReport | None] = contextvars.ContextVar("grape_pruning", default=None)


@contextlib.contextmanager
def record_pruning() -> Iterator[PruningReport]:
    """Count what `attend` skips inside the `with`, forward passes only."""
    report = PruningReport()
    token = _report.set(report)
    try:
        yield report
    finally:
        _report.reset(token)


def note(work: Tensor) -> None:
    """Add (…, 2) counts of computed and visible tiles to the open report, if there is one."""
    if not readable(work):
        return
    report = _report.get()
    if report is not None:
        computed, visible = work.reshape(-1, 2).sum(0).tolist()
        report.computed += int(computed)
        report.visible += int(visible)


def as_number(prune: Prune) -> float:
    """The form in which a choice of pruning travels through a custom op."""
    if prune is None:
        return OFF
    if prune == "auto":
        return AUTO
    number = isinstance(prune, (int, float)) and not isinstance(prune, bool)
    if not (number and math.isfinite(prune) and prune > 0):
        raise ValueError(
            "prune must be 'auto', None (off) or a positive distance in nats below a row's maximum; "
            f"got {prune!r}"
        )
    return float(prune)


def threshold(choice: float, keys: int, dtype: torch.dtype, reach: float) -> float:
    """tau. `reach` is the largest factor a gradient multiplies a weight by (0 when the bias needs none).

    At most `keys` weights are dropped, each at most e^-tau of the row's own: keys * (1 + reach) * e^-tau
    is then at most half the spacing of the dtype.
    """
    if choice != AUTO:
        return choice
    return math.log(max(keys, 1)) + math.log(1.0 + reach) - math.log(torch.finfo(dtype).eps / 2)


def tau(p: AttentionProblem) -> Tensor:
    """The threshold of a problem in nats: a 0-dim float32 tensor on its device, made without a host sync.

    n (1 + reach) e^-tau is half the spacing of float32, in which every kernel computes, whatever q's dtype.
    `reach` is the largest factor by which a gradient multiplies a dropped weight: the span of c, and for a
    path the number of its edges; 0 when no gradient of the bias is wanted. docs/attention.md has the proof.
    """
    if p.prune != AUTO:
        return p.q.new_full((), p.prune, dtype=torch.float32)
    reach = p.q.new_zeros((), dtype=torch.float64)
    if p.bias_learns and p.probe_q is not None:
        reach = reach + p.k.shape[2]
    if p.bias_learns and p.c_q is not None and p.c_k is not None:
        (low_q, high_q), (low_k, high_k) = p.c_q.aminmax(), p.c_k.aminmax()
        span = torch.maximum(high_q, high_k) - torch.minimum(low_q, low_k)
        reach = reach + span.nan_to_num(0.0, 0.0, 0.0)  # a bound of a NaN is NaN, and prunes nothing
    n = max(p.k.shape[2], 1)
    return (reach.log1p() + math.log(n) - math.log(torch.finfo(torch.float32).eps / 2)).float()


def worthwhile(choice: float, queries: int, tile: int) -> float:
    """Bounds cost one pass over the keys, as much as a query does: not for a handful of queries."""
    return OFF if choice == AUTO and queries < tile // 4 else choice


def key_bounds(k: Tensor, v: Tensor, tile: int) -> Tensor:
    """(B, Hkv, tiles): the largest |k_j| of a tile; NaN, which never prunes, where k or v is not finite."""
    norm = k.norm(dim=-1) + 0.0 * v.abs().amax(-1)
    return _tiles(norm, tile, 0.0).amax(-1)


@dataclass(frozen=True)
class SlopeBounds:
    """Per tile of keys the extremes of the coordinate and of the key's rate: (R, B, H, tiles) each."""

    c_min: Tensor
    c_max: Tensor
    rate_min: Tensor
    rate_max: Tensor

    def select(self, head: int, tiles: slice) -> SlopeBounds:
        each = (self.c_min, self.c_max, self.rate_min, self.rate_max)
        return SlopeBounds(*(x[:, :, head, tiles] for x in each))


def slope_bounds(c_k: Tensor, rate_k: Tensor | None, tile: int) -> SlopeBounds:
    rate = torch.zeros_like(c_k, dtype=torch.float32) if rate_k is None else rate_k
    low, high = float("inf"), float("-inf")
    return SlopeBounds(
        _tiles(c_k, tile, low).amin(-1),
        _tiles(c_k, tile, high).amax(-1),
        _tiles(rate, tile, low).amin(-1),
        _tiles(rate, tile, high).amax(-1),
    )


def _tiles(x: Tensor, tile: int, fill: float) -> Tensor:
    missing = -x.shape[-1] % tile
    return (F.pad(x, (0, missing), value=fill) if missing else x).unflatten(-1, (-1, tile))


def logit_bounds(q_norm: Tensor, k_norm: Tensor, slopes: tuple[Tensor, Tensor, SlopeBounds] | None) -> Tensor:
    """(…, rows, tiles): no logit of that row in that tile is larger.

    `slopes` holds c and rate of the rows, (R, …, rows), and the bounds of the tiles. A product over a
    rectangle is largest at one of its corners, whatever the signs.
    """
    bound = q_norm.unsqueeze(-1) * k_norm.unsqueeze(-2)
    if slopes is not None:
        c, rate, tiles = slopes
        offsets = [
            (edge.unsqueeze(-2) - c.unsqueeze(-1)).to(bound.dtype) for edge in (tiles.c_min, tiles.c_max)
        ]
        rates = [rate.unsqueeze(-1) + edge.unsqueeze(-2) for edge in (tiles.rate_min, tiles.rate_max)]
        corners = torch.stack([offset * slope for offset in offsets for slope in rates])
        bound = bound + corners.amax(0).sum(0)
    return bound + bound.abs() * 1e-5 + 1e-3
