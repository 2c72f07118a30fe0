"""Prepare the encodings of all layers together, to make fewer torch calls in a step of decoding.

Rotations, unit directions and slopes depend only on parameters and positions. `Preparation` stacks the parameters of
similar encodings and computes these at once. `encode` finds its result in `tokens.prepared`. Nothing is kept from
one call to the next.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..precision import autocasts, exact_dtype, transforming, working_dtype
from .base import Encoding

#: largest number of tokens to prepare; for more, the tensors of all layers together would be large
FEW = 16


@dataclass(frozen=True, eq=False)
class Prepared:
    """The result of a `Preparation`.

    Args:
        positions: (B|1, T, coords), in float64.
        working: the dtype of rates and angles.
        values: results of `Encoding.prepare` by encoding.
    """

    positions: Tensor
    working: torch.dtype
    values: Mapping[nn.Module, Any]


class Preparation:
    """Prepares all encodings of a model: `preparation(positions, dtype)` returns a `Prepared`, or None.

    Args:
        encodings: the encodings of all layers.
    """

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        self.encodings = list(encodings)
        self.device: torch.device | None = None
        self.groups: list[list[Encoding]] = []

    def __call__(self, positions: Tensor | None, dtype: torch.dtype) -> Prepared | None:
        """Prepare for checked positions, (B|1, T). None if each layer has to compute its own values."""
        if positions is None or positions.shape[1] > FEW or positions.is_floating_point():
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transforming() or autocasts(positions):
            return None
        if self.device != positions.device:
            self.device, self.groups = positions.device, self._grouped(positions.device)
        where = positions.to(exact_dtype(positions.device))
        where, working = where if where.dim() == 3 else where.unsqueeze(-1), working_dtype(dtype)
        values: dict[nn.Module, Any] = {}
        for group in self.groups:
            values.update(zip(group, type(group[0]).prepare(group, where, working), strict=True))
        return Prepared(where, working, values)

    def _grouped(self, device: torch.device) -> list[list[Encoding]]:
        """Group encodings on this device, and parts of compositions, that can be prepared together."""
        groups: dict[Hashable, list[Encoding]] = defaultdict(list)
        for part in dict.fromkeys(part for encoding in self.encodings for part in encoding.modules()):
            if not isinstance(part, Encoding) or part.like is None or hooked(part):
                continue  # a hook, such as accelerate's offloading, may replace the tensors
            if all(tensor.device == device for tensor in itertools.chain(part.parameters(), part.buffers())):
                groups[type(part), part.shape, part.like].append(part)
        return list(groups.values())


def hooked(module: nn.Module) -> bool:
    """Whether the module has forward hooks, or its `forward` was replaced."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
