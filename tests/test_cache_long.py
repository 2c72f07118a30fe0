"""A million tokens through one layer with a window: flat memory, finite, and still exact at the end."""

from __future__ import annotations

import pytest
import torch

import grape_pe as grape
from grape_pe import testing

WINDOW, CHUNK, TOTAL, CHECKED = 4096, 8192, 1_000_000, 8192
HEADS, DIM, WIDTH = 1, 16, 8


def chunk(start: int) -> testing.Sample:
    generator = torch.Generator().manual_seed(start)
    count = min(CHUNK, TOTAL - start)
    q, k, v = (torch.randn(1, HEADS, count, DIM, generator=generator) for _ in range(3))
    x = torch.randn(1, count, WIDTH, generator=generator)
    return testing.Sample(q, k, v, x, torch.arange(start, start + count))


def tail_of_the_full_computation(enc) -> torch.Tensor:
    """The last tokens and all that their windows reach, computed at once at their own positions."""
    reach = CHECKED + WINDOW
    starts = [start for start in range(0, TOTAL, CHUNK) if start + CHUNK > TOTAL - reach]
    parts = [chunk(start) for start in starts]
    q, k, v = (torch.cat([getattr(p, name) for p in parts], 2) for name in "qkv")
    x, positions = torch.cat([p.x for p in parts], 1), torch.cat([p.positions for p in parts])
    code = enc(q, k, x=x, positions=positions)
    y = grape.attend(code.q, code.k, v, bias=code.bias, window=WINDOW)
    return y[:, :, -CHECKED:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fox", "grape-ap"])
@torch.no_grad()
def test_a_million_tokens(name: str):
    torch.manual_seed(0)
    enc = grape.build(name, heads=HEADS, head_dim=DIM, width=WIDTH)
    cache = grape.StreamingCache(enc, window=WINDOW)
    sizes, outputs = set(), []
    for start in range(0, TOTAL, CHUNK):
        piece = chunk(start)
        y = cache.attend(piece.q, piece.k, piece.v, x=piece.x)
        assert y.isfinite().all(), f"not finite from token {start}"
        sizes.add(cache.tokens.size)
        outputs = [*outputs[-1:], y]
    assert cache.length == TOTAL and cache.next_position.tolist() == [TOTAL]
    assert max(sizes) <= 4 * (WINDOW + cache.rollback + CHUNK), sizes
    got = torch.cat(outputs, 2)[:, :, -CHECKED:]
    testing.assert_close(got, tail_of_the_full_computation(enc), torch.float32, name)
