"""What the tile kernels compute, as one object: the arguments of `grape::tiles`, and what follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import pruning
from .cpu.build import TILE


@dataclass(frozen=True, eq=False)
class TileProblem:
    q: Tensor
    k: Tensor
    v: Tensor
    c_q: Tensor | None
    c_k: Tensor | None
    rate_q: Tensor | None
    rate_k: Tensor | None
    probe_q: Tensor | None
    probe_k: Tensor | None
    path_rate: Tensor | None
    documents: Tensor | None
    key_padding: Tensor | None
    causal: bool
    window: int  # 0: none
    scale: float
    bounded: bool  # which link
    prune: float  # pruning.OFF, pruning.AUTO, or nats
    bias_grad: bool  # whether rates, coordinates or probes learn

    @property
    def empty(self) -> bool:
        return self.q.numel() == 0 or self.k.shape[2] == 0 or self.v.shape[-1] == 0

    def tau(self) -> float:
        """The pruning threshold in nats, or pruning.OFF."""
        choice = pruning.worthwhile(self.prune, self.q.shape[2], TILE)
        if choice == pruning.OFF:
            return pruning.OFF
        keys = self.k.shape[2]
        return pruning.threshold(choice, keys, self.q.dtype, self._reach() if self.bias_grad else 0.0)

    def _reach(self) -> float:
        """How far a gradient can magnify a dropped weight: by an offset of c, or by the edges of a path."""
        reach = 0.0 if self.probe_q is None else float(self.k.shape[2])
        if self.c_q is not None and self.c_k is not None:
            span = torch.maximum(self.c_q.max(), self.c_k.max()) - torch.minimum(
                self.c_q.min(), self.c_k.min()
            )
            reach += span.abs().nan_to_num(0.0).item()
        return reach
