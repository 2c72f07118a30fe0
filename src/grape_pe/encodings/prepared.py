"""Work of a few new tokens that all layers share: done once a call, for all layers at once.

Rotations, unit directions and slopes depend on parameters and positions only. For a step of decoding, where the
number of calls is the cost, `Preparation` stacks the parameters of like encodings and computes them together;
`encode` then finds its own in `tokens.prepared`. Nothing is kept from one call to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..precision import autocasts, exact_dtype, working_dtype
from .base import Encoding

#: tokens up to which preparing pays; beyond, tensors for all layers would be large
FEW = 16


@dataclass(frozen=True, eq=False)
class Prepared:
    """positions: (B|1, T, coords) in float64. values: by encoding, what its `prepare` returned."""

    positions: Tensor
    working: torch.dtype
    values: Mapping[nn.Module, Any]


class Preparation:
    """Prepares all encodings of a model: `preparation(positions, dtype)` returns a `Prepared`, or None."""

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        self.encodings = list(encodings)
        self.device: torch.device | None = None
        self.groups: list[list[Encoding]] = []

    def __call__(self, positions: Tensor | None, dtype: torch.dtype) -> Prepared | None:
        """For positions (B|1, T) that were checked; None where each layer has to do its own work."""
        if positions is None or positions.shape[1] > FEW or positions.is_floating_point() or not _plain():
            return None
        if autocasts(positions):
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
        """Encodings on this device that can be prepared together, parts of compositions included."""
        groups: dict[Hashable, list[Encoding]] = defaultdict(list)
        for part in dict.fromkeys(part for encoding in self.encodings for part in encoding.modules()):
            if isinstance(part, Encoding) and part.like is not None and _lives_on(part, device):
                groups[type(part), part.shape, part.like].append(part)
        return list(groups.values())


def _plain() -> bool:
    """No gradients, no transform under way."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _lives_on(part: nn.Module, device: torch.device) -> bool:
    """Its tensors are there, and no hook (accelerate's offloading) brings others."""
    return not hooked(part) and all(tensor.device == device for tensor in _tensors(part))


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    yield from part.parameters()
    yield from part.buffers()


def hooked(module: nn.Module) -> bool:
    """Whether something is to run before or after the module's `forward`, or in its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
