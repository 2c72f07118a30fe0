"""Make decoding skip keys in small cases; by default it does so from thousands of keys on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ...attention import decode
from ...cache import stream


@contextlib.contextmanager
def skipping(skips: bool) -> Iterator[None]:
    """A context in which decoding may skip keys from two keys on, if `skips`."""
    if not skips:
        yield
        return
    with mock.patch.object(stream, "BOUND_FROM", 2), mock.patch.object(decode, "WORTH", 2):
        yield
