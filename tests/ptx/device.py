"""Runs the launches of `grape_pe.attention.gpu` in the emulator, for tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from grape_pe.attention.gpu import compile as gpu
from grape_pe.attention.gpu.compile import Launch

from . import launcher
from .launcher import Report

ARCH = 80


def emulate(launch: Launch, report: Report, change: Callable[[str], str] = str) -> None:
    """Compile one launch for sm_80 and run it. `change` may edit the PTX text, to prove the detectors."""
    if 0 in launch.grid:
        return
    kernel = gpu.compiled(launch, ARCH)
    types, _, _ = gpu.signature(launch)
    arguments = [x for name, kind in types.items() for x in _flat(launch.arguments[name], kind)]
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    launcher.launch(change(kernel.asm["ptx"]), shared, warps, launch.grid, arguments, report)


def _flat(value: Any, kind: Any) -> list[Any]:
    """The tensors and numbers of an argument that are not constants."""
    if isinstance(kind, tuple):
        return [x for part in zip(value, kind, strict=True) for x in _flat(*part)]
    return [] if kind == "constexpr" else [value]


@contextmanager
def emulated_device(change: Callable[[str], str] = str) -> Iterator[Report]:
    """Inside, launches run in the emulator, and memory that was not written holds NaN."""
    report = Report()
    with pytest.MonkeyPatch.context() as patch, _poisoned():
        patch.setattr(gpu, "start", lambda launch: emulate(launch, report, change))
        yield report


@contextmanager
def _poisoned() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel reads before it was written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
