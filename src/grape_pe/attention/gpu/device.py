"""The GPU behind a tensor and the versions a verdict depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


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


def installed(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def triton_version() -> str | None:
    return installed("triton", "pytorch-triton", "triton-windows")


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "3.7.1+git" is (3, 7, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
