"""Make decoding skip keys in small cases: its thresholds are thousands of keys."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from unittest import mock

from ...attention import decode
from ...cache import stream

#: keys to a chunk; keys that may be read in vain; keys of a head from which on threads share them
Skips = tuple[int, int, int]


def draw_skipping(rng: random.Random) -> Skips:
    return rng.choice((1, 2, 3, 64)), rng.choice((0, 4, 1024)), rng.choice((1, 4, 1024))


@contextlib.contextmanager
def skipping(skips: Skips | None) -> Iterator[None]:
    """With a bound of the keys' norms, from two keys on."""
    if skips is None:
        yield
        return
    names = ("CHUNK", "WASTE", "SPLIT", "WORTH")
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(stream, "BOUND_FROM", 2))
        for name, value in zip(names, (*skips, 2), strict=True):
            patches.enter_context(mock.patch.object(decode, name, value))
        yield
