"""What surrounds a call and must not change it: autocast, a compiler that traces, tensors without data."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def without_autocast(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast would round what torch's products are given, and with it digits that are exact in float32."""
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def readable(x: Tensor) -> bool:
    """Whether it has values that Python may look at: neither traced, nor on meta, nor fake."""
    return not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))


def decided(answer: bool) -> bool:
    """The same as a plain bool: of sizes that vary torch.compile has a symbol, which attention refuses."""
    if answer:  # noqa: SIM103  # a branch, and nothing else, makes it choose
        return True
    return False
