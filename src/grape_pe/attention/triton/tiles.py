"""Which tile each kernel takes: queries, keys, warps and pipeline stages, by bias, head size and device.

The table is what the compiler accepts without spilling a register and within a device's shared memory
(docs/kernels.md has the figures; tests/test_triton_compile.py reads them from the compiler again).
Eight warps own 128 rows: in a chain of products each warp keeps 16 rows to itself, so more warps than
rows / 16 would only repeat work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    queries: int
    keys: int
    warps: int = 8
    stages: int = 2
    split: bool = False  # key kernel only: dk and dv in launches of their own


Row = tuple[Tile, Tile, Tile]  # forward, query, key
KERNELS = ("forward", "query", "key")

# The key kernel's keys are a multiple of the query kernel's: path sums are kept at the latter's borders.
_WIDE = (Tile(128, 64, stages=3), Tile(128, 64), Tile(64, 128))
_LEAST = (Tile(64, 16, warps=4), Tile(64, 16, warps=4), Tile(16, 64, warps=4, stages=1, split=True))
_HALF: dict[str, dict[int, dict[int, Row]]] = {
    "slope": {
        80: {
            32: _WIDE,
            64: (Tile(128, 64, stages=3), Tile(128, 64), Tile(32, 128)),
            128: (Tile(128, 32, stages=3), Tile(128, 16), Tile(32, 128, split=True)),
            256: _LEAST,
        },
        90: {
            32: _WIDE,
            64: (Tile(128, 64, stages=3), Tile(128, 64), Tile(32, 128)),
            128: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128, split=True)),
            256: (Tile(128, 32, stages=3), Tile(128, 16), Tile(16, 128, split=True)),
        },
        100: {
            32: _WIDE,
            64: _WIDE,
            128: (Tile(128, 64, stages=3), Tile(128, 64), Tile(32, 128)),
            256: (Tile(128, 32), Tile(128, 32), Tile(32, 128, split=True)),
        },
    },
    "path": {
        80: {
            32: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 16), Tile(32, 128, split=True)),
            128: (Tile(128, 16, stages=3), Tile(128, 16), Tile(16, 128, split=True)),
            256: _LEAST,
        },
        90: {
            32: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128)),
            128: (Tile(128, 32, stages=3), Tile(128, 32), Tile(32, 128, split=True)),
            256: (Tile(128, 16), Tile(128, 16), Tile(16, 128, split=True)),
        },
        100: {
            32: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128)),
            64: (Tile(128, 64, stages=3), Tile(128, 32), Tile(32, 128)),
            128: (Tile(128, 32, stages=3), Tile(128, 32), Tile(32, 128)),
            256: (Tile(128, 16), Tile(128, 16), Tile(16, 128, split=True)),
        },
    },
}
_BOTH: dict[int, Row] = {
    32: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True)),
    64: (Tile(128, 32), Tile(128, 16), Tile(16, 128, split=True)),
    128: (Tile(128, 32), Tile(64, 16, warps=4), Tile(16, 64, warps=4, split=True)),
    256: _LEAST,
}
_FULL: dict[int, Tile] = {
    32: Tile(64, 32, warps=4, stages=1),
    64: Tile(64, 32, warps=4, stages=1),
    128: Tile(32, 32, warps=4, stages=1),
    256: Tile(16, 16, warps=4, stages=1),
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


def tile_for(kernel: str, width: int, itemsize: int, slope: bool, path: bool, arch: int) -> Tile:
    """The tile of `kernel` ("forward" | "query" | "key") for heads padded to `width` features."""
    if _forced is not None:
        return _forced[kernel] if isinstance(_forced, dict) else _forced
    width = max(32, width)
    if itemsize == 4:
        return _FULL[width]
    if slope and path:
        return _BOTH[width][KERNELS.index(kernel)]
    return _HALF["path" if path else "slope"][_family(arch)][width][KERNELS.index(kernel)]
