"""The compiled CPU kernel: built with the system's C++ compiler on first use, and called by ctypes.

Nothing is compiled at import. The library is kept in a cache directory that only this user may write to,
under a name that depends on everything it was made from (sources, flags, compiler, processor). A lock lets
one process build while the others wait; the file appears by an atomic rename and ends with its SHA-256, so a
damaged one is rebuilt, not loaded. Without a kernel `library()` is None, the callers use plain torch, and
`why_not()` gives the reason. The command line is constant: no name or option comes from outside.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
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
    "q k v c_q c_k rate_q rate_k probe_q probe_k path_rate documents key_padding out lse norms work "
    "key_norm slope_range d_out d_lse d_q d_k d_v d_c_q d_c_k d_rate_q d_rate_k d_probe_q d_probe_k d_path_rate"
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


class NoKernel(Exception):
    """There is no compiled kernel; the message is the reason."""


def available() -> bool:
    return library() is not None


def why_not() -> str | None:
    """Why there is no compiled kernel, or None when there is one."""
    if _switched_off():
        return "GRAPE_PE_NATIVE=0 switches the compiled kernel off"
    found = _load()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL | None:
    found = "" if _switched_off() else _load()
    return None if isinstance(found, str) else found


def _switched_off() -> bool:
    return os.environ.get("GRAPE_PE_NATIVE", "").lower() in ("0", "off", "false", "no")


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none; warns once where the user can do something about it."""
    found = _attempt()
    if isinstance(found, str) and platform.system() == "Linux":
        warnings.warn(
            f"grape-pe has no compiled CPU attention kernel: {found}. Attention with a bias runs in plain "
            "torch instead: the same results, several times slower. Set GRAPE_PE_NATIVE=0 to accept that and "
            "silence this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


@functools.cache
def _attempt() -> ctypes.CDLL | str:
    try:
        return _open(_built(_compiler()))
    except NoKernel as reason:
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
        opened = ctypes.CDLL(str(path))
    except OSError as problem:
        raise NoKernel(f"the built library does not load ({problem})") from problem
    for function in (opened.grape_forward, opened.grape_backward):
        function.argtypes, function.restype = [ctypes.POINTER(Problem)], None
    return opened


def cache_directory() -> Path:
    """$GRAPE_PE_CACHE, or grape_pe under the user's cache directory."""
    chosen = os.environ.get("GRAPE_PE_CACHE")
    if chosen:  # absolute: a loader searches its own folders for a name without a folder
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grape_pe"


def _built(compiler: str) -> Path:
    """The path of the library in the cache; builds it where it is missing or damaged."""
    here = Path(__file__).parent
    texts = {name: (here / name).read_bytes() for name in SOURCES}
    try:
        directory = cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = directory / f"tiles-{_fingerprint(compiler, texts)}.so"
        _refuse_what_others_can_write(directory, target)
        if not _is_sound(target):
            with _lock(target.with_suffix(".lock")):
                if not _is_sound(target):  # another process may have built it meanwhile
                    _build(compiler, texts, target)
    except (OSError, RuntimeError) as problem:  # RuntimeError: there is no home directory
        raise NoKernel(
            f"the folder for the built library cannot be used ({problem}); set GRAPE_PE_CACHE to one that "
            "you can write to"
        ) from problem
    return target


def _refuse_what_others_can_write(*paths: Path) -> None:
    """Loading a library runs its code, so nobody else may be able to change it."""
    for path in paths:
        if path.exists():
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise NoKernel(
                    f"{path} must belong to the user who runs this (uid {os.geteuid()}, not {status.st_uid}) "
                    f"and be writable by nobody else (not mode {status.st_mode & 0o777:o}); change its owner "
                    "or mode, or set GRAPE_PE_CACHE to another folder"
                )


def _is_sound(path: Path) -> bool:
    """Whether the file is there and ends with the SHA-256 of what comes before."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system releases the lock of a process that dies."""
    import fcntl  # not on Windows

    with path.open("ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks: several may build
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, texts: dict[str, bytes], target: Path) -> None:
    print(f"grape-pe: compiling the CPU kernel, once, some seconds ({target})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        for name, text in texts.items():
            (Path(work) / name).write_bytes(text)
        content = _compile(compiler, Path(work)).read_bytes()
        whole = Path(work) / target.name
        with whole.open("wb") as file:
            file.write(content + hashlib.sha256(content).digest())  # a loader ignores the end of the file
            file.flush()
            os.fsync(file.fileno())
        whole.chmod(0o700)
        os.replace(whole, target)


def _compile(compiler: str, work: Path) -> Path:
    _call(compiler, COMPILE, work)
    for arguments in LINK:
        _call(compiler, arguments, work)
        made = work / arguments[-1]
        try:
            ctypes.CDLL(str(made), mode=os.RTLD_NOW)
            return made
        except OSError as problem:
            reason = str(problem)
    raise NoKernel(f"the built library does not load ({reason}); another GRAPE_PE_CACHE may help")


def _call(compiler: str, arguments: list[str], work: Path | None = None) -> bytes:
    """Run the compiler; returns what it printed."""
    try:
        command = [compiler, *arguments]
        return subprocess.run(command, cwd=work, capture_output=True, timeout=300, check=True).stdout
    except subprocess.CalledProcessError as problem:
        said = problem.stderr.decode(errors="replace").strip()
        raise NoKernel(f"{compiler} failed: {said[-500:]}") from problem
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NoKernel(f"{compiler} did not run ({problem})") from problem


def _fingerprint(compiler: str, texts: dict[str, bytes]) -> str:
    """Everything the library depends on; the processor because of -march=native on shared homes."""
    version = _call(compiler, ["--version"])
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
