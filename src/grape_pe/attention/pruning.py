"""Exact pruning: the one threshold below which keys cannot matter, and how much was skipped.

A kernel skips a tile of keys when an upper bound of all its logits lies `tau` nats below a lower bound of
what each of its rows already has. tau is such that everything skipped together is below the rounding of the
result, gradients of rates and coordinates included; docs/attention.md has the proof.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..precision import readable

if TYPE_CHECKING:
    from .problem import AttentionProblem

Prune = float | Literal["auto"] | None

OFF, AUTO = -1.0, 0.0  # the choices as numbers, which is what a custom op takes
#: Half the spacing of float32 at 1: every kernel computes in it, whatever the dtype of q.
ROUNDING = torch.finfo(torch.float32).eps / 2


def as_number(prune: Prune) -> float:
    """OFF, AUTO or a distance in nats; raises for anything else."""
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


def tau(p: AttentionProblem) -> Tensor:
    """The threshold of a problem in nats: a 0-dim float32 tensor on its device, made without a host sync.

    n (1 + reach) e^-tau is ROUNDING, for n keys. `reach` is the largest factor by which a gradient multiplies
    a dropped weight: the span of c, for a path the number of its edges times a bound of an edge, for a table its
    length (it may be made from a few numbers) times its largest value; 0 when the bias needs no gradient.
    """
    if p.prune != AUTO:
        return p.q.new_full((), p.prune, dtype=torch.float32)
    reach = p.q.new_zeros((), dtype=torch.float64)
    if p.bias_learns and p.probe_q is not None:
        reach = reach + p.k.shape[2] * _edge_bound(p)
    if p.bias_learns and p.c_q is not None and p.c_k is not None:
        (low_q, high_q), (low_k, high_k) = p.c_q.aminmax(), p.c_k.aminmax()
        span = torch.maximum(high_q, high_k) - torch.minimum(low_q, low_k)
        reach = reach + span.nan_to_num(0.0, 0.0, 0.0)  # the bound of such a tile is NaN, and prunes nothing
    if p.bias_learns and p.table is not None:
        sizes = [x.abs().nan_to_num(0.0, 0.0, 0.0).amax().double() for x in (p.table, p.mix) if x is not None]
        reach = reach + p.table.shape[-1] * (1.0 + sum(sizes))
    return (reach.log1p() + nats(p.k.shape[2])).float()


def _edge_bound(p: AttentionProblem) -> Tensor | float:
    """No less than any |g(z)|, nor than 1: |log sigmoid(z)| <= ln 2 + |z|, and |z| <= |probe_q| |probe_k| / P."""
    if p.bounded or p.probe_q is None or p.probe_k is None or 0 in (*p.probe_q.shape, *p.probe_k.shape):
        return 1.0
    longest = [probe.norm(dim=-1).amax().double() for probe in (p.probe_q, p.probe_k)]
    z = longest[0] * longest[1] / p.probe_q.shape[-1]
    return 1.0 + z.nan_to_num(0.0, 0.0, 0.0)  # such a path's bound is NaN, and prunes nothing


def nats(keys: int) -> float:
    """tau of "auto" for so many keys when the bias needs no gradient."""
    return math.log(max(keys, 1)) - math.log(ROUNDING)


def worthwhile(p: AttentionProblem, tile: int) -> bool:
    """Bounds cost a pass over the keys, as much as a query: not for a few queries or two tiles of keys."""
    if p.prune == AUTO:
        return p.q.shape[2] >= tile // 4 and p.k.shape[2] > 2 * tile
    return p.prune != OFF


def key_bound(k: Tensor) -> Tensor:
    """(B, Hkv): no key is longer, whatever k's dtype and the rounding of the sum. For `attend(key_bound=…)`."""
    working = torch.promote_types(k.dtype, torch.float32)
    if k.shape[2] == 0:
        return k.new_zeros(k.shape[:2], dtype=working)
    info = torch.finfo(working)
    norm = torch.linalg.vector_norm(k, dim=-1, dtype=working).amax(-1)
    return norm.mul_(1 + (k.shape[-1] + 4) * info.eps).add_(math.sqrt(k.shape[-1] * info.tiny))


@dataclass
class PruningReport:
    """How many tiles the masks left, and how many of those were computed.

    Args:
        visible: tiles with a visible key.
        computed: those of them that were computed.
    """

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
    if readable(work) and _report.get() is not None:
        computed, visible = work.reshape(-1, 2).sum(0).tolist()
        count(computed, visible)


def count(computed: int, visible: int) -> None:
    """Add these counts to the open report, if there is one; torch.compile leaves it out."""
    report = None if torch.compiler.is_compiling() else _report.get()
    if report is not None:
        report.computed += computed
        report.visible += visible
