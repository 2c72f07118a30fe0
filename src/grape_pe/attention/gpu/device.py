"""The GPU behind a tensor and the versions a verdict depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

import torch

#: Triton before this version gives wrong gradients on Hopper in some kernels
HOPPER_TRITON = (3, 7, 1)


@dataclass(frozen=True)
class Device:
    """What a verdict holds for: the GPU and its driver."""

    name: str
    capability: tuple[int, int]
    driver: str


@functools.cache
def describe(device: torch.device) -> Device:
    """The GPU behind a torch.device."""
    return Device(
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), _driver_version()
    )


def _driver_version() -> str:
    """Of the NVIDIA kernel module, where Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


@functools.cache
def triton_version() -> str | None:
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def why_refused(device: Device) -> str | None:
    """What is known to be wrong without a check."""
    if torch.version.hip:
        return "the kernels have not been tried on ROCm; GRAPE_TRITON=on uses them all the same"
    version = triton_version()
    if version is not None and device.capability[0] == 9 and release(version) < HOPPER_TRITON:
        return f"triton {version} gives wrong gradients on Hopper; install triton 3.7.1 or later"
    return None


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "3.7.1+git" is (3, 7, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
