"""Which tile each kernel takes: queries, keys, warps and pipeline stages, by bias, head size and device.

None spills a register or exceeds a device's shared memory (docs/kernels.md has the figures, and
tests/test_triton_compile.py reads them from the compiler).
Eight warps own 128 rows: in a chain of products each warp keeps 16 rows to itself, so more warps than
rows / 16 would only repeat work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    queries: int
    keys: int
    warps: int = 8
    stages: int = 2
    split: bool = False  # key kernel only: dk and dv in launches of their own
    chunk: int = 0  # features taken at a time in products along them; 0: all, kept in registers
    parts: int = 1  # programs that share a block of rows, each with a part of the features it sums up
    hoist: bool = True  # False: the compiler computes afresh for each tile what is the same for all
    registers: int | None = None  # a thread's; None: the assembler may spill some to fit a second block

    def options(self) -> dict[str, int]:
        """What the compiler is told, beside the constants of the kernel."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


Row = tuple[Tile, Tile, Tile]  # forward, query, key
KERNELS = ("forward", "query", "key")

# The key kernel's keys are a multiple of the query kernel's: path sums are kept at the latter's borders.
# Where registers do not hold a block's features beside what is summed up, programs share the block (parts) or
# read its features again (chunk).
_HALF: dict[str, dict[int, dict[int, Row]]] = {
    "slope": {
        80: {
            32: (Tile(128, 64, stages=3, registers=255), Tile(128, 64), Tile(64, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128, split=True)),
            128: (Tile(128, 32, stages=3), Tile(128, 16, stages=3), Tile(16, 128, split=True)),
            256: (Tile(128, 32, parts=2), Tile(128, 16, parts=2), Tile(16, 128, split=True, parts=2)),
        },
        90: {
            32: (Tile(128, 64, stages=3), Tile(128, 64), Tile(64, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 64), Tile(32, 128)),
            128: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128, split=True)),
            256: (Tile(128, 32, stages=3), Tile(128, 16), Tile(16, 128, split=True)),
        },
        100: {
            32: (Tile(128, 64, stages=3), Tile(128, 64), Tile(64, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 64, hoist=False), Tile(64, 128)),
            128: (Tile(128, 64, stages=3, hoist=False), Tile(128, 64, hoist=False), Tile(32, 128)),
            256: (Tile(128, 32), Tile(128, 32), Tile(32, 128, split=True)),
        },
    },
    "path": {
        80: {
            32: (Tile(128, 64, stages=3), Tile(128, 16), Tile(32, 128, split=True)),
            64: (Tile(128, 32, stages=3), Tile(128, 16), Tile(16, 128, split=True)),
            128: (Tile(128, 16, stages=3), Tile(128, 16, parts=2), Tile(16, 128, split=True, parts=2)),
            256: (
                Tile(64, 16, warps=4, parts=4),
                Tile(64, 16, warps=4, stages=1, chunk=16, parts=4),
                Tile(16, 128, split=True, chunk=64, parts=2),
            ),
        },
        90: {
            32: (Tile(128, 64, stages=3), Tile(128, 32, stages=1), Tile(32, 128)),
            64: (Tile(128, 32, stages=3), Tile(128, 32, stages=1), Tile(32, 128)),
            128: (
                Tile(128, 32, stages=3),
                Tile(64, 16, warps=4, hoist=False),
                Tile(32, 128, split=True, hoist=False),
            ),
            256: (
                Tile(64, 16, warps=4, stages=1, hoist=False),
                Tile(128, 16, parts=2),
                Tile(16, 128, stages=1, split=True, hoist=False),
            ),
        },
        100: {
            32: (Tile(128, 32, stages=3), Tile(128, 32), Tile(32, 128)),
            64: (Tile(128, 32, stages=3), Tile(128, 32, hoist=False), Tile(32, 128)),
            128: (Tile(128, 16, stages=3), Tile(64, 32, warps=4, hoist=False), Tile(32, 128, hoist=False)),
            256: (
                Tile(64, 16, warps=4, stages=1, parts=2, hoist=False),
                Tile(128, 16, parts=2, hoist=False),
                Tile(16, 128, split=True, hoist=False),
            ),
        },
    },
    "both": {
        80: {
            32: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True)),
            64: (Tile(128, 32), Tile(128, 16, parts=2), Tile(16, 128, split=True, hoist=False)),
            128: (Tile(128, 16), Tile(128, 16, parts=2), Tile(16, 128, stages=1, split=True)),
            256: (
                Tile(128, 32, parts=2),
                Tile(64, 16, warps=4, stages=1, chunk=16, parts=4, hoist=False),
                Tile(16, 64, warps=4, split=True, chunk=32, parts=4),
            ),
        },
        90: {
            32: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True)),
            64: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True)),
            128: (Tile(128, 16, stages=3), Tile(128, 16, stages=1, hoist=False), Tile(16, 128, split=True)),
            256: (
                Tile(128, 16, parts=2),
                Tile(64, 16, warps=4, stages=1, parts=4, hoist=False),
                Tile(16, 128, split=True, parts=2),
            ),
        },
        100: {
            32: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True, registers=255)),
            64: (Tile(128, 32), Tile(128, 16), Tile(32, 128, stages=1, split=True, hoist=False)),
            128: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True, hoist=False)),
            256: (
                Tile(128, 16, hoist=False),
                Tile(128, 16, parts=2, hoist=False),
                Tile(16, 128, stages=1, split=True, hoist=False),
            ),
        },
    },
}


# float32 in full precision has no matrix unit: each thread keeps rows of both operands, so few.
_FULL_FORWARD = Tile(64, 32, stages=1, chunk=32, hoist=False, registers=255)
_FULL_QUERY = Tile(32, 16, stages=1, chunk=32, hoist=False, registers=255)
_FULL_KEY = Tile(32, 32, stages=1, chunk=32, hoist=False, registers=255, split=True)
_FULL: dict[int, Row] = {
    32: (
        _FULL_FORWARD,
        replace(_FULL_QUERY, registers=None),
        replace(_FULL_KEY, queries=16, warps=4, registers=None),
    ),
    64: (_FULL_FORWARD, _FULL_QUERY, _FULL_KEY),
    128: (_FULL_FORWARD, replace(_FULL_QUERY, keys=32, parts=2), _FULL_KEY),
    256: (replace(_FULL_FORWARD, parts=2), replace(_FULL_QUERY, parts=4), replace(_FULL_KEY, parts=2)),
}

_FULL_PATH: dict[int, Row] = {
    **_FULL,
    128: (_FULL_FORWARD, replace(_FULL_QUERY, queries=16, parts=4, registers=None), _FULL_KEY),
}

# Devices with 99 KiB of shared memory a block instead of 163: what they take instead of sm_80's.
_SMALL_SHARED: dict[tuple[str, int, str], Tile] = {
    ("slope", 256, "query"): Tile(64, 16, warps=4, parts=4),
    ("slope", 256, "key"): Tile(16, 64, warps=4, stages=1, split=True, parts=2),
    ("path", 128, "query"): Tile(128, 16, stages=1, parts=2),
    ("both", 128, "query"): Tile(64, 16, warps=4, parts=2),
    ("both", 256, "forward"): Tile(128, 16, stages=1, parts=2),
}

_forced: Tile | dict[str, Tile] | None = None


@contextmanager
def force_tile(tile: Tile | dict[str, Tile]) -> Iterator[None]:
    """Make every kernel take `tile`, or each its own by name: for tests, and for tuning on a device."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


def _family(arch: int) -> int:
    """Hopper and data-centre Blackwell have matrix units and shared memory of their own."""
    return arch // 10 * 10 if arch // 10 in (9, 10) else 80


def _has_small_shared(arch: int) -> bool:
    """Ampere and Ada for desktops and inference, Blackwell for desktops."""
    return arch in (86, 89) or arch >= 120


def tile_for(kernel: str, width: int, itemsize: int, slope: bool, path: bool, arch: int) -> Tile:
    """The tile of `kernel` ("forward" | "query" | "key") for heads padded to `width` features."""
    if _forced is not None:
        return _forced[kernel] if isinstance(_forced, dict) else _forced
    width = max(32, width)
    bias = "both" if slope and path else "path" if path else "slope"
    if itemsize == 4:
        return (_FULL_PATH if path else _FULL)[width][KERNELS.index(kernel)]
    tile = _HALF[bias][_family(arch)][width][KERNELS.index(kernel)]
    return _SMALL_SHARED.get((bias, width, kernel), tile) if _has_small_shared(arch) else tile
