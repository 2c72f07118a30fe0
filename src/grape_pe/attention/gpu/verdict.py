"""Whether the Triton kernels may be trusted on this device: checked once in a child process, then stored.

`attend(impl="auto")` asks `why_not_trusted` before it sends a call to Triton. The answer is looked up in
memory, then in the cache folder. If there is none, `python -m grape_pe.attention.gpu.check` runs the kernels
on a small case in a child process, because a bad memory access ends a CUDA context and a hang never returns.

GRAPE_TRITON=check (default) does this; =on trusts the kernels without a check; =off never uses them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cpu.build import cache_directory
from . import child
from .child import Verdict, verdict_from
from .device import Device, describe, triton_version

MODES = ("check", "on", "off")


@dataclass(frozen=True)
class Case:
    """Which kernels a call needs: head sizes as the kernels pad them, bias none | slope | path | both."""

    dtype: str
    head_dim: int
    value_dim: int
    bias: str
    masks: tuple[str, ...]

    def __str__(self) -> str:
        heads = f"{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        return f"{self.dtype}, heads of {heads}, bias {self.bias}, masks {'+'.join(self.masks) or 'none'}"


_known: dict[tuple[Any, ...], str | None] = {}
_warned: set[Case] = set()
_checking = threading.Lock()


def why_not_trusted(q: Tensor, v: Tensor, bias_kind: str, mask_names: tuple[str, ...]) -> str | None:
    """Why `auto` should not use the Triton kernels for this call, or None when they passed their check.

    `bias_kind` is none | slope | path | both; `mask_names` are some of causal, window, documents, padding.
    The first call of a kind may take a minute; later ones look in a dict. Nothing waits for the device.
    """
    passive = torch.compiler.is_compiling()
    heads = padded(q.shape[-1]), padded(v.shape[-1])
    return _why_not(q.device, q.dtype, *heads, bias_kind, mask_names, passive)


def _why_not(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    bias: str,
    masks: tuple[str, ...],
    passive: bool,
) -> str | None:
    """`passive`: look up only. torch.compile calls this while it traces and keeps the answer."""
    setting = mode()
    if setting == "on":
        return None
    if setting == "off":
        return "GRAPE_TRITON=off"
    key = (device, dtype, head_dim, value_dim, bias, masks)
    if key in _known:
        return _known[key]
    case = Case(_short(dtype), head_dim, value_dim, bias, tuple(sorted(masks)))
    return _decide(key, device, case, passive or _capturing(device))


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the package.
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _decide(key: tuple[Any, ...], device: torch.device, case: Case, passive: bool) -> str | None:
    found = describe(device)
    verdict = stored(found, case)
    if verdict is None and passive:
        return _unchecked(case)
    verdict = verdict or check(device, case)
    _known[key] = None if verdict.ok else _failed(found, case, verdict)
    return _known[key]


def mode() -> str:
    """GRAPE_TRITON, validated."""
    chosen = os.environ.get("GRAPE_TRITON", "check")
    if chosen not in MODES:
        raise ValueError(f"GRAPE_TRITON must be one of {', '.join(MODES)}; got {chosen!r}")
    return chosen


def padded(width: int) -> int:
    """Features are padded to a power of two, at least the 16 a matrix unit takes.

    By comparisons: torch.compile with dynamic shapes then has a constant, and one guard for each.
    """
    size = 16
    while size < width:
        size *= 2
    return size


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _unchecked(case: Case) -> str:
    """The reason, and one warning: a traced program keeps its slower kernels for good."""
    _warn_once(
        case,
        f"the Triton kernels have not been checked on this device ({case}), and no check can run while "
        "torch.compile traces or a CUDA graph is captured, so this program takes slower kernels. Call the "
        "model once without torch.compile first, or run `grape doctor`. GRAPE_TRITON=on skips the check, "
        "GRAPE_TRITON=off silences this warning.",
    )
    return "not yet checked on this device, and no check can run while tracing or capturing a graph"


def _failed(device: Device, case: Case, verdict: Verdict) -> str:
    _warn_once(
        case,
        f"the Triton attention kernels failed their check on {device.name} ({case}): {verdict.reason}. The "
        "next implementation is used instead, which is slower; attend.explain(…) says which. "
        "GRAPE_TRITON=off silences this warning; `grape doctor` checks again. Please report it with the "
        "file that `grape doctor --out doctor.json` writes.",
    )
    return f"its check failed on this device: {verdict.reason}"


def _warn_once(case: Case, text: str) -> None:
    if case not in _warned:
        _warned.add(case)
        warnings.warn(f"grape-pe: {text}", stacklevel=2)


@functools.cache
def source_hash() -> str:
    """Of every Python file in this folder."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


# Stored verdicts


def full_key(device: Device, case: Case) -> dict[str, Any]:
    """Everything a verdict depends on, as JSON."""
    parts = {
        "device": asdict(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "source": source_hash(),
        "case": asdict(case),
    }
    return json.loads(json.dumps(parts))  # type: ignore[no-any-return]


def folder() -> Path | None:
    """The cache folder, made if need be; None unless it is the user's and nobody else may write to it."""
    path = cache_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError:
        return None
    others = stat.S_IWGRP | stat.S_IWOTH
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & others):
        return None
    return path


def _file(device: Device, case: Case) -> Path | None:
    name = hashlib.sha256(json.dumps(full_key(device, case), sort_keys=True).encode()).hexdigest()[:20]
    place = folder()
    return None if place is None else place / f"triton-{name}.json"


def stored(device: Device, case: Case) -> Verdict | None:
    """The verdict in the cache folder; a file that is damaged or was made for something else is ignored."""
    path = _file(device, case)
    try:
        found = json.loads(path.read_text()) if path is not None else None
        if not isinstance(found, dict) or found["key"] != full_key(device, case):
            return None
        return verdict_from(found["verdict"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(device: Device, case: Case, verdict: Verdict) -> None:
    """Atomic; without a usable folder the verdict lives as long as the process."""
    path = _file(device, case)
    if path is None or not verdict.conclusive:
        return
    text = json.dumps({"key": full_key(device, case), "verdict": asdict(verdict)}, indent=1)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return


# The check


def check(device: torch.device, case: Case, again: bool = False) -> Verdict:
    """Run the check in a child process and store its verdict; one at a time on this machine.

    Whoever waited for another process finds that process's verdict, unless `again` asks for a new one.
    """
    found = describe(device)
    with _checking:
        try:
            with _machine_lock():
                verdict = None if again else stored(found, case)
                if verdict is None:
                    verdict = child.run({**asdict(case), "impl": "triton", "device": str(device)})
                    store(found, case, verdict)
                return verdict
        except TimeoutError:
            return Verdict(False, "another process has been checking for too long", conclusive=False)


@contextmanager
def _machine_lock() -> Iterator[None]:
    """One check at a time, so that eight processes do not run eight; none where the folder has no locks."""
    from filelock import FileLock

    place = folder()
    lock = None if place is None else FileLock(place / "check.lock", timeout=4 * child.LIMIT)
    try:
        if lock is not None:
            lock.acquire()
    except TimeoutError:
        raise
    except (OSError, NotImplementedError):
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
