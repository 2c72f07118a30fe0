"""The compiled CPU kernel: built with the system's C++ compiler on first use, and called by ctypes.

The library is kept in a cache directory that only this user may write to, under a name that depends on
everything it was made from. It appears by an atomic rename and ends with its SHA-256, so a damaged one is
rebuilt, not loaded. The command line is constant: no name or option comes from outside.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import folder

SOURCES = ("simd.h", "tiles.cpp", "decode.cpp")
COMPILE = ["-c", "tiles.cpp", "decode.cpp", "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"]
COMPILE += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# With its OpenMP symbols left open the library shares the threads of torch's runtime, which is loaded already.
# Where that does not load, it is linked with a runtime of its own.
OBJECTS = ["-shared", "tiles.o", "decode.o"]
LINK = ([*OBJECTS, "-o", "shared.so"], [*OBJECTS, "-fopenmp", "-o", "own.so"])


class NoKernel(Exception):
    """There is no compiled kernel; the message is the reason."""


def available() -> bool:
    return why_not() is None


def why_not() -> str | None:
    """Why there is no compiled kernel, or None when there is one. torch.compile asks once, while it traces."""
    if os.environ.get("GRAPE_PE_NATIVE", "").lower() in ("0", "off", "false", "no"):
        return "GRAPE_PE_NATIVE=0 switches the compiled kernel off"
    found = _load()
    return found if isinstance(found, str) else None


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the package.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run(name: str, problem: bytes, *numbers: int) -> Any:
    """Call a function of the library; the caller keeps the arrays of the problem alive meanwhile."""
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(f"the compiled CPU attention kernel is not available: {found}")
    return getattr(found, name)(problem, *numbers)


def check_array(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], contiguous: bool = False
) -> None:
    """The kernels read addresses: whatever is not exactly as they expect must not reach them."""
    if x.dtype != dtype or x.shape != shape or not x.is_cpu or (contiguous and not x.is_contiguous()):
        raise ValueError(
            f"the CPU attention kernel reads {name} as {'contiguous ' if contiguous else ''}{dtype} of shape "
            f"{shape}, got {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} on {x.device}"
        )


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none; warns where the user can do something about it."""
    try:
        return _open(_built(_compiler()))
    except NoKernel as reason:
        if platform.system() == "Linux":
            warnings.warn(
                f"grape-pe has no compiled CPU attention kernel: {reason}. Attention with a bias runs in plain "
                "torch instead: the same results, several times slower. Set GRAPE_PE_NATIVE=0 to accept that and "
                "silence this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
        return str(reason)


def _compiler() -> str:
    if platform.system() != "Linux":
        raise NoKernel(f"it is built on Linux only, and this is {platform.system() or 'an unknown system'}")
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NoKernel("no C++ compiler: neither g++ nor clang++ is on the PATH (try `apt install g++`)")
    return found


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise NoKernel(f"the library does not load ({problem}); another GRAPE_PE_CACHE may help") from problem
    for function in (library.grape_forward, library.grape_backward):
        function.argtypes, function.restype = [ctypes.c_char_p], None
    library.grape_decode.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def _built(compiler: str) -> Path:
    """The path of the library in the cache; one process builds it where it is missing or damaged."""
    texts = {name: (Path(__file__).parent / name).read_bytes() for name in SOURCES}
    try:
        target = folder.safe_folder() / f"tiles-{_fingerprint(compiler, texts)}.so"
        if target.exists():
            folder.refuse_what_others_can_write(target)
        if not _is_sound(target):
            with folder.lock(target.with_suffix(".lock")):
                if not _is_sound(target):  # another process may have built it meanwhile
                    _build(compiler, texts, target)
    except OSError as problem:
        raise NoKernel(
            f"the folder for the built library cannot be used ({problem}); set GRAPE_PE_CACHE to one that "
            "only you can write to"
        ) from problem
    return target


def _is_sound(path: Path) -> bool:
    """Whether the file is there and ends with the SHA-256 of what comes before."""
    content = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _build(compiler: str, texts: dict[str, bytes], target: Path) -> None:
    print(f"grape-pe: compiling the CPU kernel, once, some seconds ({target})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        work = Path(place)
        for name, text in texts.items():
            (work / name).write_bytes(text)
        _call(compiler, COMPILE, work)
        try:
            content = _linked(compiler, LINK[0], work)
        except NoKernel:
            content = _linked(compiler, LINK[1], work)
        with (work / target.name).open("wb") as file:
            file.write(content + hashlib.sha256(content).digest())  # a loader ignores the end of the file
            file.flush()
            os.fsync(file.fileno())
        (work / target.name).chmod(0o700)
        os.replace(work / target.name, target)


def _linked(compiler: str, arguments: list[str], work: Path) -> bytes:
    """The content of a library that loads."""
    _call(compiler, arguments, work)
    _open(work / arguments[-1])
    return (work / arguments[-1]).read_bytes()


def _call(compiler: str, arguments: list[str], work: Path | None = None) -> bytes:
    """Run the compiler; returns what it printed."""
    try:
        command = [compiler, *arguments]
        return subprocess.run(command, cwd=work, capture_output=True, timeout=300, check=True).stdout
    except subprocess.CalledProcessError as problem:
        message = problem.stderr.decode(errors="replace").strip()
        raise NoKernel(f"{compiler} failed: {message[-500:]}") from problem
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NoKernel(f"{compiler} did not run ({problem})") from problem


def _fingerprint(compiler: str, texts: dict[str, bytes]) -> str:
    """Everything the library depends on; the processor because of -march=native on shared homes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    made_from = [str((torch.__version__, COMPILE, LINK, flags)).encode(), _call(compiler, ["--version"])]
    return hashlib.sha256(b"\0".join([*made_from, *texts.values()])).hexdigest()[:20]
