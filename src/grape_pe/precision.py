"""The precision of positions, angles, gates and rotations, under any autocast and default dtype."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

Args = ParamSpec("Args")
Result = TypeVar("Result")


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which positions, angles and running sums are formed: float64 where it exists."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are multiplied: at least float32."""
    full = dtype is torch.float32 or dtype is torch.float64
    return dtype if full else torch.promote_types(dtype, torch.float32)


def readable(x: Tensor) -> bool:
    """Whether Python may look at its values: not while torch.compile traces or a CUDA graph is captured.

    Meta and fake tensors have none.
    """
    if torch.compiler.is_compiling() or x.is_meta or is_fake(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def ensure(ok: Tensor, readable: bool, message: str) -> None:
    """A ValueError where Python may read the value, else an assertion on the device."""
    if not readable:
        torch._assert_async(ok, message)
    elif not bool(ok):
        raise ValueError(message)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for tensors like x; the meta device has none."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast rounds the inputs of matrix products, which undoes an upcast to float32."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def ignores_autocast(
    method: Callable[Concatenate[Any, Tensor, Args], Result],
) -> Callable[Concatenate[Any, Tensor, Args], Result]:
    """Decorates a method whose first argument is a tensor: it runs with autocast off."""

    @functools.wraps(method)
    def run(self: Any, x: Tensor, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with without_autocast(x):
            return method(self, x, *args, **kwargs)

    return run


class WideLinear(nn.Linear):
    """A linear layer computed in at least float32, also under autocast and with weights in half precision.

    For gates and probes: a running sum adds up their rounding errors.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = working_dtype(x.dtype)
        if x.dtype == self.weight.dtype == wide and not autocasts(x):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(wide)
        with without_autocast(x):
            return F.linear(x.to(wide), self.weight.to(wide), bias)
