"""Coordinates of float64 in kernels of float32."""

from __future__ import annotations

import torch
from torch import Tensor


def as_two_floats(c: Tensor) -> tuple[Tensor, Tensor]:
    """c as float32 and what that leaves out: their differences, taken apart, lose nothing of c_j - c_t.

    An infinity is all in the first: infinity minus infinity would be no number.
    """
    high = c.to(torch.float32)
    return high, torch.where(high.isfinite(), c - high, 0.0).to(torch.float32)
