"""Fuzz target: random operations on a cache against dense attention over each sequence alone.

The operations append tokens (with padding, packed documents or positions), crop, fork, select, repeat, save, load and
rebase a cache. All tokens are also kept in lists, from which the expected outputs are computed for each document alone,
without padding, cache or `attend`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...cache import Norms, StreamingCache
from ...encodings import Encoding
from ...layers import KVShift, RMSNorm
from ..laws import TOL
from .dense import dense_attention
from .draw import Sizes
from .encodings import WIDTH, draw_encoding
from .runner import Outcome
from .skipping import skipping
from .static import Static

FIELDS = ("q", "k", "v", "x")
#: words of messages of refusals that are always right
NAMED = (
    "sinks",
    "convolution",
    "packed documents",
    "cannot be moved",
    "cannot be rebased",
    "coords",
    "is full",
)


@dataclass
class Token:
    """One token of one sequence: q (H, D), k, v (Hkv, D), x (C)."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    position: Any
    document: int


@dataclass
class World:
    """A cache and, for each sequence, all its tokens and the outputs that were not compared yet."""

    cache: StreamingCache | Static
    dtype: torch.dtype
    generator: torch.Generator
    sequences: list[list[Token]]
    pending: list[dict[int, Tensor]]
    reach: list[int]  # number of tokens that `crop` must be able to remove
    skips: bool = False  # see `skipping`
    threads: int = 1
    moved: bool = False  # whether the cache was rebased, which rounds keys once more
    outcome: Outcome = field(default_factory=Outcome)
    log: list[str] = field(default_factory=list)


def check(seed: int) -> Outcome:
    """Run random operations; raise an AssertionError if any output differs."""
    rng = random.Random(seed)
    world = _draw_world(rng, seed)
    operations, weights = (STATIC, [8, 1, 2]) if isinstance(world.cache, Static) else (OPERATIONS, WEIGHTS)
    before = torch.get_num_threads()
    torch.set_num_threads(world.threads)
    try:
        with torch.no_grad(), skipping(world.skips):
            _feed(world, rng)
            for _ in range(rng.randint(2, 9)):
                rng.choices(operations, weights)[0](world, rng)
            _feed(world, rng)
            _compare(world)
    except Exception as error:
        raise AssertionError(f"{error}\n  {_describe(world)}\n  " + "\n  ".join(world.log)) from error
    finally:
        torch.set_num_threads(before)
    return world.outcome


def _describe(world: World) -> str:
    c = world.cache
    shift = f"shift={c.shift is not None}, key_norm={c.key_norm is not None}"
    shift = f"{shift}, norm_after={c.norm_after is not None}, {world.dtype}"
    sizes = f"window={c.window}, sinks={c.sinks}, rollback={c.rollback}, capacity={c.capacity}"
    runs = f"{type(c).__name__}, skips={world.skips}, {world.threads} threads"
    return f"{c.encoding!r}, {sizes}, {shift}, {runs}"


def _draw_world(rng: random.Random, seed: int) -> World:
    batch, kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2))
    width = rng.choice((2, 4, 4, 5))
    sizes = Sizes(batch, kv_heads * group, kv_heads, 0, 0, width, width)
    dtype = rng.choice((torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16))
    encoding = draw_encoding(rng, sizes).to(dtype)
    window = rng.choice((None, None, 1, 2, 3, 5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shift = KVShift(WIDTH, kv_heads).to(dtype) if rng.random() < 0.35 else None
    settings: dict[str, Any] = {
        "window": window,
        "sinks": rng.choice((0, 0, 1, 3)) if window else 0,
        "shift": shift,
        "key_norm": RMSNorm(width, 1e-5).to(dtype) if rng.random() < 0.2 else None,
        "norm_after": None if _sets_norms(encoding) else _draw_norms(rng, seed, width, dtype),
    }
    cache: StreamingCache | Static
    if encoding.coords == 1 and "path" not in repr(encoding) and rng.random() < 0.25:
        cache = Static(encoding, capacity=rng.choice((40, 200)), **settings)
    else:
        kept: dict[str, Any] = {
            "rollback": rng.choice((0, 2, 5, 128)),
            "capacity": rng.choice((None, None, 50)),
        }
        cache = StreamingCache(encoding, **kept, **settings)
    world = World(
        cache,
        dtype,
        torch.Generator().manual_seed(seed),
        [[] for _ in range(batch)],
        [{} for _ in range(batch)],
        [0] * batch,
    )
    world.skips = rng.random() < 0.4
    world.threads = rng.choice((1, 1, 1, 2))
    return world


def _sets_norms(encoding: Encoding) -> bool:
    """Whether layers raise an error for a norm after this encoding."""
    return any(isinstance(part, Encoding) and part.sets_norms for part in encoding.modules())


def _draw_norms(rng: random.Random, seed: int, width: int, dtype: torch.dtype) -> Norms | None:
    if rng.random() < 0.8:
        return None
    norms, generator = (RMSNorm(width, 1e-5).to(dtype), RMSNorm(width, 1e-5).to(dtype)), torch.Generator()
    for i, norm in enumerate(norms):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator.manual_seed(seed + i))
    return norms


# Feeding ------------------------------------------------------------------------------------------


def _feed(world: World, rng: random.Random) -> None:
    batch = len(world.sequences)
    static = isinstance(world.cache, Static)
    slots = rng.choice((static + 0, 1, 1, 2, 3, 5, 9))
    padding = torch.zeros(batch, slots, dtype=torch.bool)
    kind = rng.choice(("none", "none", "left", "right", "anywhere", "anywhere"))
    early = min(map(len, world.sequences)) <= world.cache.sinks
    if world.cache.sinks and not static and early and rng.random() < 0.8:
        kind = "none"  # padding is refused until every sequence has its sinks
    for row in padding if kind != "none" else []:
        count = rng.randint(0, slots)
        known = {"left": range(count), "right": range(slots - count, slots)}
        row[list(known.get(kind, rng.sample(range(slots), count)))] = True
    new = [[_draw_token(world) for _ in range(slots)] for _ in range(batch)]
    where = _place(world, rng, new, padding)
    stacked = {name: _stack(world, [[getattr(t, name) for t in row] for row in new], name) for name in FIELDS}
    x = stacked.pop("x")
    given = {"padding": padding} if kind != "none" else {}
    silent = rng.random() < 0.1
    call: Callable[..., Any] = world.cache.attend
    if silent and isinstance(world.cache, StreamingCache):
        call = world.cache.append
    world.log.append(f"feed {kind} {(~padding).long().tolist()} {where}")
    try:
        got = call(**stacked, x=x, **given, **where)
    except ValueError as error:
        right = any(word in str(error) for word in (*NAMED, f"{slots} more do not fit"))
        return _refuse(world, error, right)
    for b, row in enumerate(new):
        kept = [(i, token) for i, token in enumerate(row) if not padding[b, i]]
        for i, token in kept:
            if not silent:
                world.pending[b][len(world.sequences[b])] = got[b, :, i]
            world.sequences[b].append(token)
        world.reach[b] = min(world.cache.rollback, world.reach[b] + len(kept))
        if not silent and slots:
            assert not got[b, :, padding[b]].any(), "rows of padding must be zero"


def _draw_token(world: World) -> Token:
    shape, generator = world.cache.encoding.shape, world.generator

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(world.dtype)

    d = shape.head_dim
    return Token(draw(shape.heads, d), draw(shape.kv_heads, d), draw(shape.kv_heads, d), draw(WIDTH), 0, 0)


def _stack(world: World, rows: list[list[Tensor]], name: str) -> Tensor:
    """(B, T, C) for x, (B, heads, T, D) for the others."""
    shape = world.cache.encoding.shape
    size = (WIDTH,) if name == "x" else (shape.heads if name == "q" else shape.kv_heads, shape.head_dim)
    flat = [token for row in rows for token in row]
    whole = torch.stack(flat) if flat else torch.zeros(0, *size, dtype=world.dtype)
    whole = whole.view(len(rows), -1 if flat else 0, *size)
    return whole if name == "x" else whole.transpose(1, 2)


def _place(world: World, rng: random.Random, new: list[list[Token]], padding: Tensor) -> dict[str, Tensor]:
    """Draw positions and documents of the tokens; returns the arguments that pass them to the cache."""
    slots, coords = padding.shape[1], world.cache.encoding.coords
    kind = rng.choice(("follow", "follow", "follow", "gaps", "documents")) if coords == 1 else "grid"
    if kind == "documents" and isinstance(world.cache, Static):
        kind = "gaps"
    places, ids = torch.zeros(len(new), slots, dtype=torch.float64), torch.zeros(len(new), slots).long()
    grid = torch.randint(0, 9, (len(new), slots, coords), generator=world.generator)
    for b, row in enumerate(new):
        tokens = world.sequences[b]
        place, document = (tokens[-1].position, tokens[-1].document) if tokens else (-1, 0)
        for i, token in enumerate(row):
            if not padding[b, i] and kind != "grid":
                starts = kind == "documents" and rng.random() < 0.3
                document = document + 1 if starts else document
                place = 0 if starts else place + (rng.choice((1, 1, 2, 7)) if kind == "gaps" else 1)
            places[b, i], ids[b, i] = place if kind != "grid" else 0, document
            token.position = grid[b, i] if kind == "grid" else place
            token.document = document
    whole = bool((places == places.round()).all())
    known = {
        "follow": {},
        "gaps": {"positions": places.long() if whole else places},
        "documents": {"documents": ids},
        "grid": {"positions": grid},
    }
    return known[kind]


# The other operations -----------------------------------------------------------------------------


def _crop(world: World, rng: random.Random) -> None:
    _compare(world)
    lengths = [len(tokens) for tokens in world.sequences]
    if rng.random() < 0.5:
        counts = [rng.randint(0, min(lengths))] * len(lengths)
        given: Any = counts[0]
    else:
        counts = [rng.randint(0, min(n, rng.choice((1, 3, 9)))) for n in lengths]
        given = torch.tensor(counts)
    world.log.append(f"crop {counts} of {lengths}")
    try:
        world.cache.crop(given)
    except ValueError as error:
        lost = any(c > reach for c, reach in zip(counts, world.reach, strict=True))
        return _refuse(world, error, "sinks" in str(error) or (lost and "no longer cached" in str(error)))
    for b, count in enumerate(counts):
        del world.sequences[b][lengths[b] - count :]
        world.reach[b] = max(0, world.reach[b] - count)


def _fork(world: World, rng: random.Random) -> None:
    """Append other tokens to one of the two copies, and continue with the other one."""
    world.log.append("fork, feed the other:")
    copy = world.cache.fork()
    ours, world.cache = (world.cache, copy) if rng.random() < 0.5 else (copy, world.cache)
    other = replace(
        world,
        sequences=[list(tokens) for tokens in world.sequences],
        pending=[{} for _ in world.pending],
        reach=list(world.reach),
    )
    _feed(other, rng)
    if isinstance(other.cache, StreamingCache):
        _crop(other, rng)
    _compare(other)
    world.cache = ours
    world.log.append("back")


def _select(world: World, rng: random.Random) -> None:
    batch = len(world.sequences)
    if rng.random() < 0.3 and batch < 3:
        index = [b for b in range(batch) for _ in range(2)]
        world.cache.repeat(2)
    else:
        index = [rng.randrange(batch) for _ in range(rng.randint(1, 3))]
        world.cache.select(torch.tensor(index))
    world.log.append(f"select {index}")
    world.sequences = [list(world.sequences[b]) for b in index]
    world.pending = [dict(world.pending[b]) for b in index]
    world.reach = [world.reach[b] for b in index]


def _save(world: World, rng: random.Random) -> None:
    world.log.append("save and load")
    c = world.cache
    fresh = StreamingCache(
        c.encoding,
        window=c.window,
        sinks=c.sinks,
        rollback=c.rollback,
        capacity=c.capacity,
        shift=c.shift,
        key_norm=c.key_norm,
        norm_after=c.norm_after,
    )
    saved = c.state_dict()
    c.rebase(3) if _rebases(c) else None  # must not change what was saved
    world.cache = fresh.load_state_dict(saved)


def _rebases(cache: StreamingCache | Static) -> bool:
    encoding = cache.encoding
    if cache.norm_after is not None:
        return False
    return encoding.coords == 1 and not encoding.breaks_relative_law and "path" not in repr(encoding)


def _rebase(world: World, rng: random.Random) -> None:
    _compare(world)
    if world.dtype == torch.bfloat16:
        return
    offset = rng.choice((1, 3.0, -2, 7))
    world.log.append(f"rebase {offset}")
    try:
        world.cache.rebase(offset)
    except ValueError as error:
        return _refuse(world, error, not _rebases(world.cache))
    world.moved = True
    for b, tokens in enumerate(world.sequences):
        world.sequences[b] = [replace(token, position=token.position - int(offset)) for token in tokens]


OPERATIONS: list[Callable[[World, random.Random], None]] = [_feed, _crop, _fork, _select, _save, _rebase]
WEIGHTS = [8, 5, 1, 2, 1, 1]
STATIC = [_feed, _fork, _select]  # of a static cache


def _refuse(world: World, error: ValueError, right: bool) -> None:
    """Count a refusal if it is right; otherwise fail."""
    assert right, f"refused: {error}"
    words = [word for word in str(error).split() if not any(c.isdigit() for c in word)]
    world.outcome.refused.append(" ".join(words)[:70])
    world.log.append(f"refused: {error}")


# What is expected ---------------------------------------------------------------------------------


def _compare(world: World) -> None:
    """Compare all pending outputs with each sequence computed alone."""
    for b, (tokens, pending) in enumerate(zip(world.sequences, world.pending, strict=True)):
        start = 0
        while start < len(tokens) and pending:
            stop = start
            while stop < len(tokens) and tokens[stop].document == tokens[start].document:
                stop += 1
            rows = [t for t in pending if start <= t < stop]
            if rows:
                want = expected(world.cache, tokens[start:stop], start)
                _check_close(
                    world, torch.stack([pending[t] for t in rows]), want[[t - start for t in rows]], b
                )
            start = stop
        pending.clear()


def _check_close(world: World, got: Tensor, want: Tensor, b: int) -> None:
    limit = TOL[world.dtype] * (100 if world.moved else 4)
    assert got.isfinite().all(), f"sequence {b} is not finite"
    off = ((got.double() - want).abs() / want.abs().clamp_min(1.0)).max().item()
    assert off <= limit, f"sequence {b} is off by {off:.3g}, allowed {limit:.3g}"
    world.outcome.runs += 1


def expected(cache: StreamingCache | Static, tokens: list[Token], first: int) -> Tensor:
    """The outputs of one document, (T, H, Dv) in float64; its first token has index `first` in its sequence."""
    q, k, v = (torch.stack([getattr(t, name) for t in tokens], 1)[None] for name in "qkv")
    x = torch.stack([t.x for t in tokens])[None]
    if cache.shift is not None:
        k, v = (
            _shifted(t, x, getattr(cache.shift, f"gate_{name}").weight) for name, t in (("k", k), ("v", v))
        )
    if cache.key_norm is not None:
        k = cache.key_norm(k)
    places = torch.stack([torch.as_tensor(t.position) for t in tokens])
    code = cache.encoding(q, k, x=x, v=v, positions=places)
    if cache.norm_after is not None:
        code = replace(code, q=cache.norm_after[0](code.q), k=cache.norm_after[1](code.k))
    t = torch.arange(len(tokens))
    apart = t.unsqueeze(-1) - t
    visible = apart >= 0
    if cache.window is not None:
        visible = visible & ((apart < cache.window) | (t + first < cache.sinks))
    scale = code.q.shape[-1] ** -0.5
    return dense_attention(code.q, code.k, v.double(), code.bias, visible, scale, torch.float64)[0].transpose(
        0, 1
    )


def _shifted(now: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """a_t before_t + (1 - a_t) now_t with a = sigmoid(w x), zero before the first token."""
    gate = torch.sigmoid(x @ weight.T).transpose(1, 2).unsqueeze(-1)
    before = torch.cat([torch.zeros_like(now[:, :, :1]), now[:, :, :-1]], 2)
    return (gate * before + (1 - gate) * now).to(now.dtype)
