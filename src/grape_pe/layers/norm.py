"""RMSNorm with its own backward, which reads memory fewer times on the CPU than torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..precision import transforming


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with a faster backward for float32 and float64 on the CPU, outside torch.compile and torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        eps = self.eps
        assert eps is not None and isinstance(self.weight, Tensor)
        full = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        # _Normed has no rules for torch.compile, torch.func and forward mode
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transforming()
        if full and x.device.type == "cpu" and plain:
            return _Normed.apply(x, self.weight, eps)  # type: ignore[no-any-return,no-untyped-call]
        return F.rms_norm(x, self.normalized_shape, self.weight, eps)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, weight, scale)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """d x = scale * (w g - u <w g, u> / C) and d w = sum of g u, with u the normalized x."""
        unit, weight, scale = ctx.saved_tensors
        both = grad * unit
        along = (both @ weight).unsqueeze(-1).div_(-unit.shape[-1])
        d_x = (grad * weight).addcmul_(unit, along).mul_(scale)
        return d_x, both.reshape(-1, unit.shape[-1]).sum(0), None
