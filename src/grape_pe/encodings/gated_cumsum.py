"""Running sums over tokens of a non-negative gate of the input.

Used with different gates for the log forget of FoX, and for GRAPE's contextual phase and phase-modulated slope
(Eq. M10, A7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_choice
from ..precision import WideLinear, exact_dtype, working_dtype

Gate = Literal["sigmoid", "softplus", "forget"]
STEPS: dict[Gate, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda z: torch.sigmoid(z / 16),  # divided by 16, as in the paper's experiments
    "softplus": F.softplus,
    "forget": lambda z: F.softplus(-z),  # -log sigmoid(z)
}


def softplus_inverse(y: float) -> float:
    """The inverse of softplus: z with softplus(z) = y."""
    return y + math.log(-math.expm1(-y))


class GatedCumsum(nn.Module):
    """The cumulative sum over tokens of gates of x, in float64: (B, T, C) -> (B, sums, T).

    Args:
        width: C.
        sums: number of gates of a token, each with its own sum.
        gate: the function of a linear projection of x: "sigmoid", "softplus" or "forget".
        bias: initial bias of the projection.
        weight_std: standard deviation of the initial weights of the projection.
    """

    def __init__(self, width: int, sums: int, gate: Gate, bias: float, weight_std: float = 0.0) -> None:
        super().__init__()
        check_choice("gate", gate, STEPS)
        self.gate, self.initial_bias, self.weight_std = gate, bias, weight_std
        self.projection = WideLinear(width, sums)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.projection.bias.fill_(self.initial_bias)
            self.projection.weight.normal_(0.0, self.weight_std)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        """The sum up to and including each token. `state` is the output for the tokens before, or None."""
        z = self.projection(x)
        # contiguous, because torch.compile assumes wrong strides in the backward of softplus of a transposed input
        steps = STEPS[self.gate](z.to(working_dtype(z.dtype)).transpose(1, 2).contiguous())
        exact = exact_dtype(x.device)
        total = steps.to(exact) if x.shape[1] == 1 else steps.cumsum(-1, dtype=exact)
        return total if state is None else total + self._last(state, total)

    def before(self, total: Tensor, state: Tensor | None) -> Tensor:
        """The sum before each token, given `total`, the output of `forward`."""
        start = torch.zeros_like(total[..., :1]) if state is None else self._last(state, total)
        return torch.cat([start, total[..., :-1]], -1)

    @staticmethod
    def _last(state: Tensor, total: Tensor) -> Tensor:
        if not isinstance(state, Tensor) or state.shape[:2] != total.shape[:2] or state.shape[-1] < 1:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(
                f"state must be the one returned by the previous call, of shape ({total.shape[0]}, "
                f"{total.shape[1]}, …), got {got}"
            )
        return state[..., -1:]
