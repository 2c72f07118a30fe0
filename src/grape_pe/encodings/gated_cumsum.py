"""Contextual clocks: running sums of a non-negative gate of the input, one step a token.

FoX's log-forget, GRAPE's contextual phase and its phase-modulated slope are the same thing with
different gates (Eq. M10, A7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..precision import WideLinear, exact_dtype, working_dtype

Gate = Literal["sigmoid", "softplus", "forget"]
STEPS: dict[Gate, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda z: torch.sigmoid(z / 16),  # the authors' experiments divide by 16
    "softplus": F.softplus,
    "forget": lambda z: F.softplus(-z),  # -log sigmoid(z): how much is forgotten
}


def softplus_inverse(y: float) -> float:
    """z with softplus(z) = y."""
    return y + math.log(-math.expm1(-y))


class GatedCumsum(nn.Module):
    """(B, T, C) -> (B, n, T): inclusive running sums in float64, continued from a state."""

    def __init__(self, width: int, clocks: int, gate: Gate, bias: float, weight_std: float = 0.0) -> None:
        super().__init__()
        if gate not in STEPS:
            raise ValueError(f"gate must be one of {', '.join(map(repr, STEPS))}; got {gate!r}")
        self.gate, self.initial_bias, self.weight_std = gate, bias, weight_std
        self.projection = WideLinear(width, clocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.projection.bias.fill_(self.initial_bias)
            self.projection.weight.normal_(0.0, self.weight_std)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        """The sum up to and including each token."""
        z = self.projection(x)
        # contiguous: of a transposed input, softplus's backward tells torch.compile other strides than it has
        steps = STEPS[self.gate](z.to(working_dtype(z.dtype)).transpose(1, 2).contiguous())
        exact = exact_dtype(x.device)
        total = steps.to(exact) if x.shape[1] == 1 else steps.cumsum(-1, dtype=exact)
        return total if state is None else total + self._last(state, total)

    def before(self, total: Tensor, state: Tensor | None) -> Tensor:
        """The sum before each token, from what `forward` returned."""
        start = torch.zeros_like(total[..., :1]) if state is None else self._last(state, total)
        return torch.cat([start, total[..., :-1]], -1)

    @staticmethod
    def _last(state: Tensor, total: Tensor) -> Tensor:
        if not isinstance(state, Tensor) or state.shape[:2] != total.shape[:2] or state.shape[-1] < 1:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(
                f"state must be what the previous call returned, ({total.shape[0]}, {total.shape[1]}, …); "
                f"got {got}"
            )
        return state[..., -1:]
