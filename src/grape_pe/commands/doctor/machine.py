"""The machine: versions and conflicts, compiler, cache folder, devices."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

from ...attention.cpu import build
from ...attention.folder import safe_folder
from ...attention.gpu.api import OLDEST_TRITON
from ...attention.gpu.store import describe, installed, release, triton_version

#: (package, requirement) pairs to compare with the installed versions
REQUIREMENTS = (("grape-pe", "torch"), ("grape-pe", "transformers"), ("torch", "triton"))
SETTINGS = ("GRAPE_TRITON", "GRAPE_PE_NATIVE", "TRITON_INTERPRET")


def versions() -> dict[str, str | None]:
    """Versions; None if not installed."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "grape-pe": installed("grape-pe"),
        "torch": torch.__version__,
        "triton": triton_version(),
        "transformers": installed("transformers"),
    }


def conflicts() -> list[str]:
    """Incompatible versions, as sentences."""
    found = [text for who, what in REQUIREMENTS if (text := _outside(who, what)) is not None]
    triton = triton_version()
    if triton is not None and release(triton) < OLDEST_TRITON:
        found.append(f"triton {triton} compiles wrong gradients for Hopper GPUs; install 3.7.1 or later")
    return found


def _outside(who: str, what: str) -> str | None:
    """A sentence if the installed `what` is outside the range that `who` requires."""
    have = triton_version() if what == "triton" else installed(what)
    wanted = _declared(who, what)
    if have is None or wanted is None or satisfies(have, wanted):
        return None
    return f"{what} {have} is installed, {who} needs {what}{wanted}"


def _declared(who: str, what: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires(who) or []:
            name = re.match(r"[\w.-]+", line)
            if name is not None and name[0] == what:
                return line[name.end() :].split(";")[0].strip(" ()")
    return None


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version satisfies a specifier such as ">=2.13,<2.15"."""
    return all(_meets(release(version), *clause) for clause in re.findall(r"([<>=!~]+)\s*([^\s,]+)", wanted))


def _meets(have: tuple[int, ...], sign: str, number: str) -> bool:
    want = release(number)
    size = max(len(have), len(want))
    a, b = (numbers + (0,) * (size - len(numbers)) for numbers in (have, want))
    if sign == "~=":
        return a >= b and have[: len(want) - 1] == want[:-1]
    return {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b, "==": a == b, "!=": a != b}.get(sign, True)


def settings() -> dict[str, str]:
    """Environment variables that select implementations."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def compiler() -> str | None:
    """The first line of the C++ compiler's --version."""
    path = shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return scrub(f"{Path(path).name}, which does not run ({problem})")
    return (done.stdout.splitlines() or [Path(path).name])[0]


def cpu_kernel() -> dict[str, Any]:
    """Whether the CPU kernel is built; `failed` if it could not be, although it is not disabled."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reason = build.why_not()
    return {"built": reason is None, "reason": scrub(reason or "") or None, "failed": bool(caught)}


def cache() -> dict[str, Any]:
    """State of the cache folder, without its name."""
    try:
        place = safe_folder()
    except OSError:
        return {"usable": False, "reason": "it cannot be created, is not yours, or others may write to it"}
    files = {"kernels": "*.so", "verdicts": "triton-*.json", "tuned": "tiles-*.json"}
    return {"usable": True} | {name: len(list(place.glob(pattern))) for name, pattern in files.items()}


def cpu() -> dict[str, Any]:
    return {
        "name": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def gpus() -> list[dict[str, Any]]:
    return [_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _gpu(device: torch.device) -> dict[str, Any]:
    found, limits = describe(device), torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": ".".join(map(str, found.capability)),
        "driver": found.driver,
        "memory_gib": round(limits.total_memory / 2**30, 1),
        "multiprocessors": limits.multi_processor_count,
        "shared_memory_kib": limits.shared_memory_per_multiprocessor // 1024,
    }


def why_no_gpu() -> str | None:
    if torch.cuda.device_count():
        return None
    built = torch.version.cuda or torch.version.hip
    if not built:
        return "this torch was built without CUDA"
    return f"torch was built for {'CUDA' if torch.version.cuda else 'ROCm'} {built} but finds no device"


def scrub(text: str) -> str:
    """Without paths, the user's name and the host's name."""
    text = re.sub(r"(['\"])(?:[A-Za-z]:)?[/\\].*?\1", r"\1<path>\1", text)  # quoted, may contain spaces
    text = re.sub(r"(?<![\w.])(?:[A-Za-z]:)?[/\\][^\s'\":,;)]+", "<path>", text)
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _names() -> list[str]:
    names = [socket.gethostname(), socket.gethostname().split(".")[0]]
    for name in (lambda: Path.home().name, getpass.getuser):
        with contextlib.suppress(OSError, KeyError, RuntimeError):  # no such user in the password file
            names.append(name())
    return [name for name in names if name]
