"""A million tokens through one layer with a window: flat memory, finite, and still exact at the end."""

from __future__ import annotations

import pytest
import torch

import grape_pe as grape
from grape_pe import testing

WINDOW, CHUNK, TOTAL, CHECKED = 4096, 8192, 1_000_000, 8192
SINGLE = 64  # the last tokens, fed one at a time
HEADS, DIM, WIDTH = 1, 16, 8


def chunk(start: int) -> testing.Sample:
    generator = torch.Generator().manual_seed(start)
    count = min(CHUNK, TOTAL - start)
    q, k, v = (torch.randn(1, HEADS, count, DIM, generator=generator) for _ in range(3))
    x = torch.randn(1, count, WIDTH, generator=generator)
    return testing.Sample(q, k, v, x, torch.arange(start, start + count))


def part(sample: testing.Sample, first: int, last: int) -> testing.Sample:
    q, k, v = (t[:, :, first:last] for t in (sample.q, sample.k, sample.v))
    return testing.Sample(q, k, v, sample.x[:, first:last], sample.positions[first:last])


def feed(cache: grape.StreamingCache, sample: testing.Sample) -> torch.Tensor:
    return cache.attend(sample.q, sample.k, sample.v, x=sample.x)


def end_of_the_full_computation(enc, sinks: int) -> torch.Tensor:
    """The first and last tokens and all that their windows reach, at once and at their own positions."""
    reach = CHECKED + WINDOW
    starts = [start for start in range(0, TOTAL, CHUNK) if start + CHUNK > TOTAL - reach]
    parts = [part(chunk(0), 0, sinks), *(chunk(start) for start in starts)]
    q, k, v = (torch.cat([getattr(p, name) for p in parts], 2) for name in "qkv")
    x, positions = torch.cat([p.x for p in parts], 1), torch.cat([p.positions for p in parts])
    code = enc(q, k, x=x, positions=positions)
    y = grape.attend(code.q, code.k, v, bias=code.bias, window=WINDOW, sinks=sinks)
    return y[:, :, -CHECKED:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sinks"), [("fox", 0), ("grape-ap", 0), ("rope", 4)])
@torch.no_grad()
def test_a_million_tokens(name: str, sinks: int):
    torch.manual_seed(0)
    enc = grape.build(name, heads=HEADS, head_dim=DIM, width=WIDTH)
    cache = grape.StreamingCache(enc, window=WINDOW, sinks=sinks)
    sizes, outputs = set(), []
    for start in range(0, TOTAL, CHUNK):
        piece = chunk(start)
        count = piece.q.shape[2]
        whole = count if start + count < TOTAL else count - SINGLE
        ranges = [(0, whole), *((i, i + 1) for i in range(whole, count))]
        y = torch.cat([feed(cache, part(piece, *limits)) for limits in ranges], 2)
        assert y.isfinite().all(), f"not finite from token {start}"
        sizes.add(cache.tokens.size)
        outputs = [*outputs[-1:], y]
    assert cache.length == TOTAL and cache.next_position.tolist() == [TOTAL]
    assert max(sizes) <= 4 * (WINDOW + cache.rollback + CHUNK), sizes
    got = torch.cat(outputs, 2)[:, :, -CHECKED:]
    testing.assert_close(got, end_of_the_full_computation(enc, sinks), torch.float32, name)
