"""The compiled tile kernel: built with the system's C++ compiler on first use, and called by ctypes.

Nothing is compiled at import. The library lands in a cache directory under a name that depends on
everything it was made from (sources, flags, compiler, processor), by an atomic rename, so any number of
processes may be the first. Without a compiler, or with GRAPE_PE_NATIVE=0, `library()` is None and the
callers use plain torch. The command line is constant: no name or option comes from outside.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

TILE = 64  # BQ and BK of tiles.cpp
SOURCES = ("simd.h", "tiles.cpp")
COMPILE = ["-c", "tiles.cpp", "-o", "tiles.o", "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"]
COMPILE += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# torch has loaded an OpenMP runtime already, and globally: leaving its symbols open lets us share its
# threads instead of bringing a second pool that would fight for the same cores. Where that does not
# load, link one of our own.
LINK = (["-shared", "tiles.o", "-o", "shared.so"], ["-shared", "tiles.o", "-fopenmp", "-o", "own.so"])

_SIZES = "B H KV HP Tq Tk D Dv R P causal window sinks bounded threads splits"
_STRIDES = "cq_stride ck_stride rq_stride rk_stride"
_POINTERS = (
    "q k v c_q c_k rate_q rate_k probe_q probe_k path_rate documents padding out lse norms work "
    "key_norm slope_range d_out d_lse d_q d_k d_v d_cq d_ck d_rate_q d_rate_k d_probe_q d_probe_k d_path_rate"
)


class Problem(ctypes.Structure):
    """Mirror of `Problem` in tiles.cpp: sizes, strides, two reals, pointers."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES.split()),
        *((name, ctypes.c_int64 * 4) for name in _STRIDES.split()),
        ("scale", ctypes.c_float),
        ("tau", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


def available() -> bool:
    return library() is not None


def why_not() -> str | None:
    """Why there is no compiled kernel, or None when there is one."""
    if available():
        return None
    if _switched_off():
        return "GRAPE_PE_NATIVE=0 switches the compiled kernel off"
    return "no C++ compiler (g++ or clang++) could build it"


def _switched_off() -> bool:
    return os.environ.get("GRAPE_PE_NATIVE", "1") == "0"


def library() -> ctypes.CDLL | None:
    return None if _switched_off() else _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux":
        return None
    try:
        return _open(_built(compiler))
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        detail = getattr(problem, "stderr", b"") or b""
        warnings.warn(
            f"grape-pe could not build its CPU attention kernel ({problem}); using plain torch, which is "
            f"slower. {detail.decode(errors='replace')[-500:]}",
            stacklevel=2,
        )
        return None


def _open(path: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(path))
    for function in (opened.grape_forward, opened.grape_backward):
        function.argtypes, function.restype = [ctypes.POINTER(Problem)], None
    return opened


def cache_directory() -> Path:
    """$GRAPE_PE_CACHE, or grape_pe under the user's cache directory."""
    chosen = os.environ.get("GRAPE_PE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grape_pe"


def _built(compiler: str) -> Path:
    here = Path(__file__).parent
    texts = {name: (here / name).read_bytes() for name in SOURCES}
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = directory / f"tiles-{_fingerprint(compiler, texts)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for name, text in texts.items():
            (Path(work) / name).write_bytes(text)
        made = _compile(compiler, Path(work))
        os.replace(made, target)
    return target


def _compile(compiler: str, work: Path) -> Path:
    def call(arguments: list[str]) -> None:
        subprocess.run([compiler, *arguments], cwd=work, capture_output=True, timeout=300, check=True)

    call(COMPILE)
    for arguments in LINK:
        call(arguments)
        if _opens(work / arguments[-1]):
            return work / arguments[-1]
    raise OSError("the library was built but does not load")


def _opens(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError:
        return False
    return True


def _fingerprint(compiler: str, texts: dict[str, bytes]) -> str:
    """Everything the library depends on; the processor because of -march=native on shared homes."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    cpu = Path("/proc/cpuinfo")
    flags = {
        line for line in cpu.read_text().splitlines() if line.startswith(("flags", "model name", "Features"))
    }
    parts = [version, torch.__version__.encode(), str((COMPILE, LINK)).encode()]
    parts += [line.encode() for line in sorted(flags)] + list(texts.values())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def run(name: str, problem: Problem) -> None:
    """Call grape_forward or grape_backward; whoever made `problem` keeps its arrays alive meanwhile."""
    opened = library()
    if opened is None:
        raise RuntimeError(f"the compiled CPU attention kernel is not available: {why_not()}")
    getattr(opened, name)(ctypes.byref(problem))
