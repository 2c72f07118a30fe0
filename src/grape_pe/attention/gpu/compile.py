"""Launches as data, their compilation for devices that need not be here, and the choice of a tile that fits.

A `Launch` is a kernel, a grid and arguments. `start` runs it on its tensors' device. `compiled` compiles
the very same launch, on a machine without a GPU too, and `Usage` reads what it needs: shared memory,
registers, spills, tensor memory. A tile is the first of a short list of candidates whose compiled kernel
fits and does not spill.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .api import DEVICES

#: columns of tensor memory a block may have; a kernel that wants more compiles to a trap
TENSOR_MEMORY_LIMIT = 512
INTERPRETED = triton.knobs.runtime.interpret
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8",
}  # fmt: skip


class Tile(NamedTuple):
    """Queries, keys, warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int | bool]:
        # FP fusion is Triton's default only up to 3.9, so it is set here.
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True, eq=False)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tile: Tile

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.arguments.values() if isinstance(x, Tensor))

    def ordered(self) -> list[Any]:
        return [self.arguments[name] for name in self.kernel.arg_names]


def start(launch: Launch) -> None:
    """Run a launch on the device of its tensors, whatever the current device is."""
    options = {} if INTERPRETED else launch.tile.options()
    with torch.cuda.device(launch.device if launch.device.type == "cuda" else -1):
        launch.kernel[launch.grid](*launch.ordered(), **options)


def signature(
    launch: Launch,
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and known multiples of 16, as Triton infers them from the arguments of a call."""
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value, special = launch.arguments[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr or (special and type(value) is int and value == 1):
            kind, aligned = "constexpr", False
            constants[(place,)] = value
        elif isinstance(value, Tensor):
            kind, aligned = _TYPES[value.dtype], value.is_meta or value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            kind, aligned = "i32" if -(2**31) <= value < 2**31 else "i64", special and value % 16 == 0
        else:
            kind, aligned = "fp32", False
        types[parameter.name] = kind
        if aligned:
            multiples[(place,)] = [["tt.divisibility", 16]]
    return types, constants, multiples


def compiled(launch: Launch, arch: int) -> Any:
    """A launch compiled for its own device, or for sm_<arch> if its tensors are not on a GPU."""
    if launch.device.type == "cuda":
        with torch.cuda.device(launch.device):
            return launch.kernel.warmup(*launch.ordered(), grid=launch.grid, **launch.tile.options())
    source = ASTSource(launch.kernel, *signature(launch))
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.tile.options())


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs of its device."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack: registers that did not fit
    shared: int  # bytes
    tensor_memory: int  # columns, on sm_100
    traps: bool  # whether the compiler gave up and wrote a trap

    @classmethod
    def of(cls, kernel: Any) -> Usage:
        registers, stack = read_cubin(kernel.asm["cubin"])
        columns = getattr(kernel.metadata, "tmem_size", None) or 0
        return cls(registers, stack, kernel.metadata.shared, columns, "trap;" in kernel.asm["ptx"])

    def why_not(self, arch: int) -> str | None:
        """Why the device cannot run it, or None. A spill is slow, not wrong."""
        limit = 1024 * DEVICES[arch]
        if self.shared > limit:
            return f"it needs {self.shared} bytes of shared memory, sm_{arch} has {limit}"
        if self.tensor_memory > TENSOR_MEMORY_LIMIT:
            return f"it needs {self.tensor_memory} columns of tensor memory of {TENSOR_MEMORY_LIMIT}"
        return "the compiler turned it into a trap" if self.traps else None


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, from the .nv.info section of the compiled ELF file."""
    found = {0x2F: 0, 0x11: 0}  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
    headers = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * n) for n in range(count)]
    strings = sections[names][4]
    for section in sections:
        name = cubin[strings + section[0] :].split(b"\0", 1)[0]
        if name == b".nv.info":
            at, end = section[4], section[4] + section[5]
            while at < end:
                form, kind, length = struct.unpack_from("<BBH", cubin, at)
                body = length if form == 4 else 0  # EIFMT_SVAL; the others keep their value in the header
                if kind in found:
                    found[kind] = max(found[kind], struct.unpack_from("<II", cubin, at + 4)[1])
                at += 4 + body
    return found[0x2F], found[0x11]


#: constants that a tile sets
TILE_NAMES = ("BM", "BN", "BORDER")
_chosen: dict[tuple[Any, ...], Tile] = {}


def forget_choices() -> None:
    """Choose tiles anew: those that are wanted have changed."""
    _chosen.clear()


def fitting(
    make: Callable[[Tile], Launch],
    candidates: Sequence[Tile],
    arch: int,
    tuned: Callable[[], Tile | None] = lambda: None,
) -> Launch:
    """The launch with the tile that `_choose` takes, once for each kernel, its constants, dtypes and device."""
    if INTERPRETED:
        return make(candidates[-1])
    key = _key(make(candidates[0]), arch)
    if key not in _chosen:
        _chosen[key] = _choose(make, candidates, arch, tuned())
    return make(_chosen[key])


def _key(launch: Launch, arch: int) -> tuple[Any, ...]:
    """What the compiled kernel depends on besides the tile."""
    types, constants, _ = signature(launch)
    names = launch.kernel.arg_names
    fixed = ((names[place], x) for (place,), x in constants.items() if names[place] not in TILE_NAMES)
    return launch.kernel.__name__, arch, *types.items(), *fixed


def _choose(
    make: Callable[[Tile], Launch], candidates: Sequence[Tile], arch: int, tuned: Tile | None
) -> Tile:
    """The first tile that fits without spilling, else the one that spills least.

    The tuned tile comes before all others if it fits, even if it spills: it was timed.
    """
    spills: dict[Tile, int] = {}
    reasons: dict[Tile, str] = {}
    for tile in candidates if tuned is None else (tuned, *candidates):
        usage = Usage.of(compiled(make(tile), arch))
        reason = usage.why_not(arch)
        if reason is not None:
            reasons[tile] = f"{tile.queries} x {tile.keys}: {reason}"
        elif tile == tuned or not usage.spilled:
            return tile
        else:
            spills[tile] = usage.spilled
    if spills:
        return min(spills, key=spills.__getitem__)
    raise RuntimeError(
        f"no tile of {make(candidates[0]).kernel.__name__} fits sm_{arch} ({'; '.join(reasons.values())}); "
        "use another implementation, for example impl='blocks'"
    )
