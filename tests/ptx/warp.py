"""What 32 threads do together. Registers are flat arrays over all threads; a warp is 32 neighbours.

The layouts of fragments are those of the PTX manual ("Matrix Fragments for mma.m16n8k16"): lane = 4 * group
+ t.
"""

from __future__ import annotations

import numpy as np

from .memory import Array

LANE = np.arange(32)
GROUP, T = LANE >> 2, LANE & 3


def bf16_bits(x: Array) -> Array:
    """float32 bits (uint32) to bfloat16 bits, to the nearest, ties to even; NaN stays NaN."""
    rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where((x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint32(0x7FFF), rounded)


def f16_bits(x: Array) -> Array:
    """float32 bits to float16 bits, as uint32."""
    return x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)


def tf32_bits(x: Array) -> Array:
    """float32 bits rounded to the 10 bits of TF32, ties away from zero; NaN and infinity stay."""
    special = (x & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return np.where(special, x, (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000))


def shuffle(mode: str, x: Array, b: Array, clamp: Array) -> Array:
    """shfl.sync over whole warps; `clamp` as in PTX: segment mask and largest lane."""
    n = x.size
    lane = np.arange(n) & 31
    b, clamp = np.broadcast_to(b, n).astype(np.int64), np.broadcast_to(clamp, n).astype(np.int64)
    segment, limit = (clamp >> 8) & 31, clamp & 31
    highest = (lane & segment) | (limit & ~segment)
    if mode == "bfly":
        source = lane ^ b
        inside = source <= highest
    elif mode == "up":
        source = lane - b
        inside = source >= highest
    elif mode == "down":
        source = lane + b
        inside = source <= highest
    else:
        source = (lane & segment) | (b & ~segment & 31)
        inside = source <= highest
    return x[np.arange(n) - lane + np.where(inside, source, lane)]


def reduce(operation: str, x: Array) -> Array:
    """redux.sync."""
    rows = x.reshape(-1, 32)
    one = {"min": rows.min, "max": rows.max, "add": rows.sum}[operation](1)
    return np.repeat(one.astype(x.dtype), 32)


def matrix_rows(rows: Array, transposed: bool) -> Array:
    """ldmatrix: (warps, 8, 8) halves -> one register a lane: two neighbours of a row, or of a column."""
    if transposed:
        rows = rows.transpose(0, 2, 1)
    low, high = rows[:, GROUP, 2 * T], rows[:, GROUP, 2 * T + 1]
    return (low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))).reshape(-1)


def _places(pairs: list[tuple[Array, Array]], width: int) -> Array:
    """For every (register, lane, half) its flat place in the fragment's matrix."""
    return np.stack([row * width + column for row, column in pairs], -1).reshape(32, -1)


_HALF_A = _places(
    [(GROUP + r, 2 * T + c + half) for r, c in ((0, 0), (8, 0), (0, 8), (8, 8)) for half in (0, 1)], 16
)
_HALF_B = _places([(2 * T + k + half, GROUP) for k in (0, 8) for half in (0, 1)], 8)
_TF32_A = _places([(GROUP + r, T + c) for r, c in ((0, 0), (8, 0), (0, 4), (8, 4))], 8)
_TF32_B = _places([(T + k, GROUP) for k in (0, 4)], 8)
_OUT = _places([(GROUP + r, 2 * T + c) for r in (0, 8) for c in (0, 1)], 8)


def _numbers(registers: list[Array], kind: str) -> Array:
    """(warps, 32, numbers) float32 that the registers of each lane hold."""
    x = np.stack([r.reshape(-1, 32) for r in registers], -1)
    if kind == "tf32":
        return (x & np.uint32(0xFFFFE000)).view(np.float32)
    halves = x.view(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def mma(kind: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.sync m16n8k16 (bf16, f16) or m16n8k8 (tf32), accumulating in float32."""
    warps, inner = a[0].size // 32, 8 if kind == "tf32" else 16
    place_a, place_b = (_TF32_A, _TF32_B) if kind == "tf32" else (_HALF_A, _HALF_B)
    left, right = np.empty((warps, 16 * inner), np.float32), np.empty((warps, inner * 8), np.float32)
    left[:, place_a] = _numbers(a, kind)
    right[:, place_b] = _numbers(b, kind)
    product = np.matmul(left.reshape(-1, 16, inner), right.reshape(-1, inner, 8))
    total = product.reshape(warps, -1)[:, _OUT] + np.stack(
        [x.view(np.float32).reshape(-1, 32) for x in c], -1
    )
    return [np.ascontiguousarray(total[..., i]).reshape(-1).view(np.uint32) for i in range(4)]
