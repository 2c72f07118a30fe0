"""Launches as data, their compilation (also for devices that are not present), and the choice of a tile.

`start` runs a `Launch` on its device. `compiled` compiles it, also on a machine without a GPU, and `Usage` reads
what it needs: shared memory, registers, spills, tensor memory. The tile is the first of a short list of candidates
whose compiled kernel fits and does not spill.
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
    arguments: dict[str, Any]  # by name; may be more than the kernel takes
    tile: Tile
    device: torch.device

    def ordered(self) -> list[Any]:
        return [self.arguments[name] for name in self.kernel.arg_names]


def start(launch: Launch) -> None:
    """Run a launch on its device, whatever the current device is."""
    with torch.cuda.device(launch.device):
        launch.kernel[launch.grid](*launch.ordered(), **launch.tile.options())


Place = tuple[int, ...]  # of an argument, or of a number or tensor in a tuple


def signature(launch: Launch) -> tuple[dict[str, Any], dict[Place, Any], dict[Place, Any]]:
    """Types, constants and known multiples of 16, as Triton infers them from the arguments of a call."""
    constants: dict[Place, Any] = {}
    multiples: dict[Place, Any] = {}

    def infer(value: Any, place: Place, special: bool, constant: bool) -> Any:
        if constant or value is None or (special and type(value) is int and value == 1):
            constants[place] = value
            return "constexpr"
        if isinstance(value, tuple):
            found = [infer(x, (*place, n), special, False) for n, x in enumerate(value)]
            return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        kind, aligned = "fp32", False
        if isinstance(value, Tensor):
            kind, aligned = _TYPES[value.dtype], value.is_meta or value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            kind, aligned = "i32" if -(2**31) <= value < 2**31 else "i64", special and value % 16 == 0
        if aligned:
            multiples[place] = [["tt.divisibility", 16]]
        return kind

    types = {
        x.name: infer(launch.arguments[x.name], (n,), not x.do_not_specialize, x.is_constexpr)
        for n, x in enumerate(launch.kernel.params)
    }
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


_chosen: dict[Any, Tile] = {}


def forget_choices() -> None:
    """Choose tiles anew: the tuned ones have changed."""
    _chosen.clear()


def fitting(
    make: Callable[[Tile], Launch],
    candidates: Sequence[Tile],
    arch: int,
    key: Any,
    tuned: Callable[[], Tile | None] = lambda: None,
) -> Launch:
    """The launch with the tile that `_choose` takes, once for each key: what is compiled, besides the tile."""
    if key not in _chosen:
        _chosen[key] = _choose(make, candidates, arch, tuned())
    return make(_chosen[key])


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
