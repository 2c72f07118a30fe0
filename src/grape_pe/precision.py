"""Helpers for precision: dtypes, autocast, and values that torch.compile or CUDA graphs cannot read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

Args = ParamSpec("Args")
Result = TypeVar("Result")


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype for positions, angles and running sums: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for computations with tensors of `dtype`: at least float32."""
    full = dtype is torch.float32 or dtype is torch.float64
    return dtype if full else torch.promote_types(dtype, torch.float32)


def readable(x: Tensor) -> bool:
    """Whether Python can read the values of x: not under torch.compile or CUDA graph capture, or if x has no values."""
    if torch.compiler.is_compiling() or x.is_meta or is_fake(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def transforming() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def ensure(ok: Tensor, readable: bool, message: str) -> None:
    """Check a condition: with a ValueError if Python can read it, else with an assertion on the device."""
    if not readable:
        torch._assert_async(ok, message)
    elif not bool(ok):
        raise ValueError(message)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is enabled for the device of x; never for the meta device."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disable autocast for the device of x, because it would round float32 inputs of matrix products."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def ignores_autocast(
    method: Callable[Concatenate[Any, Tensor, Args], Result],
) -> Callable[Concatenate[Any, Tensor, Args], Result]:
    """Decorator that disables autocast in a method whose first argument is a tensor."""

    @functools.wraps(method)
    def run(self: Any, x: Tensor, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with without_autocast(x):
            return method(self, x, *args, **kwargs)

    return run


class WideLinear(nn.Linear):
    """A linear layer computed in at least float32, also under autocast and for weights in half precision.

    Used for gates and probes, because rounding errors would add up in their running sums.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = working_dtype(x.dtype)
        if x.dtype == self.weight.dtype == wide and not autocasts(x):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(wide)
        with without_autocast(x):
            return F.linear(x.to(wide), self.weight.to(wide), bias)
