"""JSON files in the cache folder: verdicts on the kernels and tuned tiles, each with the full key it holds for.

The key: the GPU and its driver, the versions of torch and Triton, the sources of the kernels, and the case.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..folder import lock, safe_folder

#: by the name of a kernel: queries, keys, warps and stages of its tile
Tiles = dict[str, list[int]]


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
    """Of the NVIDIA kernel module, on Linux."""
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


@dataclass(frozen=True)
class Case:
    """Which kernels a call needs: head sizes as the kernels pad them, bias as in problem.bias_kind."""

    dtype: str
    head_dim: int
    value_dim: int
    bias: str
    masks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, dtype: torch.dtype, head_dim: int, value_dim: int, bias: str, masks: Iterable[str] = ()
    ) -> Case:
        name = str(dtype).removeprefix("torch.")
        return cls(name, padded(head_dim), padded(value_dim), bias, tuple(sorted(masks)))

    def __str__(self) -> str:
        heads = f"{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        return f"{self.dtype}, heads of {heads}, bias {self.bias}, masks {'+'.join(self.masks) or 'none'}"


def padded(width: int) -> int:
    """Features are padded to a power of two, at least the 16 a matrix unit takes.

    By comparisons: torch.compile with dynamic shapes then has a constant, and one guard for each.
    """
    size = 16
    while size < width:
        size *= 2
    return size


@functools.cache
def source_hash() -> str:
    """Of every Python file in this folder."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def full_key(device: Device, case: Case, **more: Any) -> dict[str, Any]:
    """Everything a stored value depends on, as JSON."""
    parts = {
        "device": asdict(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "source": source_hash(),
        "case": asdict(case),
    }
    return json.loads(json.dumps(parts | more))  # type: ignore[no-any-return]


def _file(kind: str, key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return safe_folder() / f"{kind}-{name}.json"


def read(kind: str, key: dict[str, Any]) -> Any:
    """The stored value, or None; a file that is damaged or was made for another key is ignored."""
    try:
        found = json.loads(_file(kind, key).read_text())
        return found["value"] if found["key"] == key else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(kind: str, key: dict[str, Any], value: Any) -> bool:
    """Whether it was stored. Atomic; False where the cache folder cannot be used."""
    try:
        path = _file(kind, key)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(json.dumps({"key": key, "value": value}, indent=1))
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def machine_lock(seconds: float) -> AbstractContextManager[None]:
    """One process at a time; no lock without a cache folder. TimeoutError after `seconds`."""
    try:
        return lock(safe_folder() / "check.lock", seconds)
    except OSError:
        return nullcontext()


# Tuned tiles


@functools.cache
def kept_tiles(device: Device, case: Case) -> Tiles:
    """What `grape doctor --tune` kept for this dtype, head size and bias, whatever the masks; {} for nothing."""
    found = read("tiles", full_key(device, replace(case, masks=())))
    return found if isinstance(found, dict) else {}


def keep_tiles(device: Device, case: Case, tiles: Tiles) -> bool:
    kept = write("tiles", full_key(device, replace(case, masks=())), tiles)
    kept_tiles.cache_clear()
    return kept
