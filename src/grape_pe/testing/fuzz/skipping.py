"""Make decoding skip keys in small cases: its threshold is thousands of keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ...attention import decode
from ...cache import stream


@contextlib.contextmanager
def skipping(skips: bool) -> Iterator[None]:
    """With a bound of the keys' norms, from two keys on."""
    if not skips:
        yield
        return
    with mock.patch.object(stream, "BOUND_FROM", 2), mock.patch.object(decode, "WORTH", 2):
        yield
