"""A seeded permutation of range(size) whose elements are computed independently, without a table.

A Feistel network permutes [0, 4^b). Elements outside [0, size) pass through it again until they are inside
(cycle walking), which gives a permutation of [0, size).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8
SMALLEST_HALF = 4  # bits: narrower halves have too few permutations

Integers = npt.NDArray[np.uint64]


def permute(indices: npt.ArrayLike, size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The image of each index under the permutation of (seed, epoch)."""
    values = np.array(indices, dtype=np.uint64, ndmin=1)
    if size < 1 or values.max(initial=0) >= size:
        raise ValueError(f"indices must be below size, got size {size} and index {values.max(initial=0)}")
    half = max(SMALLEST_HALF, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = _feistel(values, half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _keys(seed: int, epoch: int) -> Integers:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(values: Integers, half: int, keys: Integers) -> Integers:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def mix(words: Integers) -> Integers:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
