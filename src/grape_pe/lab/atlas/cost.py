"""Time of a layer relative to the same layer with RoPE, measured in alternation on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...layers import Attention

#: tokens of a training step, and in the cache before decoding; fewer for slow encodings
TOKENS, FEW = 512, 32
#: seconds of a training step at TOKENS above which FEW are used
LIMIT = 2.0
ROUNDS, FEWEST, STEPS = 7, 3, 8
Action = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """Shortest of several times relative to RoPE."""

    train: float
    decode: float
    tokens: int


def layer_cost(name: str, width: int, heads: int) -> Cost:
    """Cost of the encoding in a `grape.Attention` of this size."""
    with one_thread():
        ours, rope = (Attention(width, heads=heads, encoding=each) for each in (name, "rope"))
        _training(ours, FEW)()  # warm-up
        few = _seconds(_training(ours, FEW))
        tokens = TOKENS if few * TOKENS / FEW < LIMIT else FEW
        train = _ratio(_training(ours, tokens), _training(rope, tokens))
        return Cost(train, _ratio(_decoding(ours, tokens), _decoding(rope, tokens)), tokens)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _training(layer: Attention, tokens: int) -> Action:
    x = torch.randn(1, tokens, layer.width, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return step


@torch.no_grad()
def _decoding(layer: Attention, tokens: int) -> Action:
    """Decode a few tokens, one at a time, after `tokens` in the cache."""
    cache = layer.cache(rollback=STEPS)
    layer(torch.randn(1, tokens, layer.width), cache=cache)
    new = torch.randn(1, 1, layer.width)

    def steps() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                layer(new, cache=cache)
            cache.crop(STEPS)

    return steps


def _ratio(ours: Action, rope: Action) -> float:
    """Of the shortest times; a few rounds at least, as one may fall on a moment when the machine is busy."""
    rope()
    end = time.perf_counter() + LIMIT
    times: list[tuple[float, float]] = []
    while len(times) < ROUNDS and (len(times) < FEWEST or time.perf_counter() < end):
        times.append((_seconds(ours), _seconds(rope)))
    return min(a for a, _ in times) / min(b for _, b in times)


def _seconds(action: Action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
