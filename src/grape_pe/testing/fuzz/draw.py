"""Draw parts of a case of attention: sizes, memory layouts of tensors, masks and biases."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bias import LINKS, Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, TileBias
from ...bias.distance import BEYOND

Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention call."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int


def draw_sizes(rng: random.Random) -> Sizes:
    kv_heads = rng.choice((1, 1, 2, 3))
    keys = rng.choice((1, 2, 5, 7, 12, 19, 33, 33, 70)) if rng.random() < 0.95 else rng.choice((0, 150, 260))
    queries = keys if rng.random() < 0.6 else rng.choice((0, 1, 1, 3, keys // 2))
    width = rng.choice((1, 2, 3, 4, 5, 8, 8, 12, 16))
    value_width = width if rng.random() < 0.6 else rng.choice((1, 3, 6, 16))
    batch = rng.choice((1, 2, 2, 3)) if rng.random() < 0.97 else 0
    return Sizes(
        batch, kv_heads * rng.choice((1, 1, 2, 3)), kv_heads, min(queries, keys), keys, width, value_width
    )


class Layout:
    """The memory layout of q, k or v: the size of a leaf tensor, and the view of it that is used."""

    KINDS = ("contiguous", "tokens first", "features of a wider tensor", "every other token", "expanded")

    def __init__(self, rng: random.Random, size: tuple[int, int, int, int]) -> None:
        self.kind = rng.choice(self.KINDS)
        batch, heads, tokens, width = size
        self.batch, self.width = batch, width
        self.size = {
            "contiguous": size,
            "tokens first": (batch, tokens, heads, width),
            "features of a wider tensor": (batch, heads, tokens, width + 3),
            "every other token": (batch, heads, 2 * tokens, width),
            "expanded": (1, heads, tokens, width),
        }[self.kind]

    def view(self, leaf: Tensor) -> Tensor:
        if self.kind == "tokens first":
            return leaf.transpose(1, 2)
        if self.kind == "features of a wider tensor":
            return leaf[..., 1 : 1 + self.width]
        if self.kind == "every other token":
            return leaf[:, :, ::2]
        if self.kind == "expanded":
            return leaf.expand(self.batch, -1, -1, -1)
        return leaf


def draw_masks(rng: random.Random, generator: torch.Generator, s: Sizes) -> dict[str, Any]:
    """Draw arguments of `attend` that mask keys."""
    masks: dict[str, Any] = {"causal": rng.random() < 0.75}
    if rng.random() < 0.3:
        masks["window"] = rng.choice((1, 2, 3, 8, s.keys + 2))
        if rng.random() < 0.5:
            masks["sinks"] = rng.choice((1, 2, 5))
    kind = rng.random()
    if kind < 0.2:
        rows = rng.choice(((s.keys,), (s.batch, s.keys)))
        dtype = rng.choice((torch.int64, torch.int32, torch.uint8))
        masks["documents"] = (torch.rand(rows, generator=generator) < 0.2).cumsum(-1).to(dtype)
    elif kind < 0.3:
        cuts = sorted(rng.randint(0, s.keys) for _ in range(2))
        masks["cu_seqlens"] = torch.tensor([0, *cuts, s.keys], dtype=rng.choice((torch.int64, torch.int32)))
    if rng.random() < 0.25:
        share = rng.choice((0.1, 0.5, 1.0))
        masks["key_padding"] = torch.rand(s.batch, s.keys, generator=generator) < share
    return masks


@dataclass
class RawBias:
    """A bias to make from leaves of the given sizes; those in `growing` are cumulative sums."""

    name: str
    sizes: dict[str, tuple[int, ...]]
    growing: set[str]
    make: Callable[[Leaves], Bias]


def draw_bias(rng: random.Random, s: Sizes) -> RawBias:
    """Draw a bias of one of `KINDS`."""
    kinds = rng.choice(KINDS).split()
    parts = [_PARTS[kind](rng, s, f"{i}.") for i, kind in enumerate(kinds)]

    def make(leaves: Leaves) -> Bias:
        made = [part.make(leaves) for part in parts]
        total = made[0]
        for other in made[1:]:
            total = total + other
        return total

    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    growing = {name for part in parts for name in part.growing}
    return RawBias("+".join(part.name for part in parts), sizes, growing, make)


def _none(rng: random.Random, s: Sizes, at: str) -> RawBias:
    return RawBias("none", {}, set(), lambda leaves: NoBias())


def _term(rng: random.Random, s: Sizes, at: str) -> RawBias:
    """Rates for each query, each key, each head; a coordinate shared or not by the batch and heads."""
    lead = rng.choice((1, s.batch)), rng.choice((1, s.heads))
    rates = rng.choice(("q", "k", "qk", "head", "head", "head+k"))
    sizes: dict[str, tuple[int, ...]] = {f"{at}c": (*lead, s.keys)}
    if "q" in rates:
        sizes[f"{at}rate_q"] = (rng.choice((1, s.batch)), rng.choice((1, s.heads)), s.queries)
    if "head" in rates:
        sizes[f"{at}rate_q"] = (1, s.heads, 1)
    if rates.endswith("k"):
        sizes[f"{at}rate_k"] = (rng.choice((1, s.batch)), s.heads, s.keys)

    def make(leaves: Leaves) -> SlopeTerm:
        c = leaves[f"{at}c"]
        rate_q, rate_k = leaves.get(f"{at}rate_q"), leaves.get(f"{at}rate_k")
        return SlopeTerm(c[:, :, s.keys - s.queries :], c, rate_q, rate_k)

    return RawBias(f"term[{rates}]", sizes, {f"{at}c"}, make)


def _slope(rng: random.Random, s: Sizes, at: str) -> RawBias:
    terms = [_term(rng, s, f"{at}{i}.") for i in range(rng.choice((1, 1, 1, 2, 3)))]
    return RawBias(
        f"slope[{', '.join(term.name for term in terms)}]",
        {name: size for term in terms for name, size in term.sizes.items()},
        {name for term in terms for name in term.growing},
        lambda leaves: SlopeBias(tuple(term.make(leaves) for term in terms)),  # type: ignore[misc]
    )


def _path(rng: random.Random, s: Sizes, at: str) -> RawBias:
    features, links = rng.choice((1, 2, 5, 8)), list(LINKS)
    link = rng.choice(links)
    batch, heads = rng.choice((1, s.batch)), rng.choice((1, s.kv_heads, s.heads))

    def make(leaves: Leaves) -> PathBias:
        return PathBias(leaves[f"{at}probe_q"], leaves[f"{at}probe_k"], leaves[f"{at}rate"], link)

    sizes: dict[str, tuple[int, ...]] = {
        f"{at}probe_q": (batch, heads, s.queries, features),
        f"{at}probe_k": (rng.choice((1, s.batch)), heads, s.keys, features),
        f"{at}rate": (1, s.heads, 1),
    }
    return RawBias(f"path[{link}]", sizes, set(), make)


def _tile(rng: random.Random, s: Sizes, at: str) -> RawBias:
    lead = rng.choice((1, s.batch)), rng.choice((1, s.heads))
    sizes: dict[str, tuple[int, ...]] = {f"{at}x_q": (*lead, s.queries, 3), f"{at}x_k": (*lead, s.keys, 3)}

    def make(leaves: Leaves) -> TileBias:
        return TileBias(_soft_distance, {"x": leaves[f"{at}x_q"]}, {"x": leaves[f"{at}x_k"]})

    return RawBias("tile", sizes, set(), make)


def _distance(rng: random.Random, s: Sizes, at: str) -> RawBias:
    """A table, alone or mixed, on one side or both, over positions of any order; some entries may be -inf."""
    tables, length = rng.choice((1, 1, 2, 3)), rng.choice((1, 4, 9, 80))
    first, beyond = -rng.choice((0, 0, length // 2, length - 1)), rng.choice(BEYOND)
    mixed, lead = rng.random() < 0.5, (rng.choice((1, s.batch)), rng.choice((1, s.heads)))
    profile = _bent if rng.random() < 0.25 else None
    holes = profile is None and not mixed and rng.random() < 0.3
    sizes: dict[str, tuple[int, ...]] = {
        f"{at}table": (1, rng.choice((1, s.heads)), 1, tables, length if profile is None else 2)
    }
    if mixed:
        sizes[f"{at}mix"] = (*lead, s.queries, tables)
    kind = rng.choice(("run", "run", "jump", "back", "far", "rows", "any"))
    positions = _positions(rng, kind, s)

    def make(leaves: Leaves) -> DistanceBias:
        table = leaves[f"{at}table"]
        if holes:
            table = table.masked_fill(torch.arange(length) % 3 == 1, -torch.inf)
        mix = leaves.get(f"{at}mix")
        return DistanceBias(
            positions[..., s.keys - s.queries :], positions, table, mix, first, beyond, profile
        )

    form = "profile" if profile else f"{length} from {first}, {beyond}{', with -inf' if holes else ''}"
    return RawBias(f"distance[{form}{', mixed' if mixed else ''}, {kind}]", sizes, set(), make)


def _positions(rng: random.Random, kind: str, s: Sizes) -> Tensor:
    """Positions, (B|1, 1, T): consecutive, with a jump, going back, far from 0, different by sequence, or random."""
    run = torch.arange(s.keys, dtype=torch.float64).view(1, 1, -1)
    jump = {"jump": 7, "back": -5}.get(kind, 0)
    if kind == "rows":
        return run + torch.tensor([rng.randrange(40) for _ in range(s.batch)]).view(-1, 1, 1)
    if kind == "any":
        return torch.tensor([rng.randrange(-30, 30) for _ in range(s.keys)]).double().view(1, 1, -1)
    return run + (2.0**45 if kind == "far" else 3.0) + jump * (run > s.keys // 2)


def _bent(distance: Tensor, numbers: Tensor) -> Tensor:
    """The profile a log(1 + |d|) + b sign(d)."""
    a, b = (numbers[..., i][(..., *(None,) * distance.dim())] for i in range(2))
    return a * torch.log1p(distance.abs().to(numbers.dtype)) + b * distance.sign().to(numbers.dtype)


def _soft_distance(
    rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]
) -> Tensor:
    offset = query["x"][:, :, rows].unsqueeze(3) - key["x"][:, :, cols].unsqueeze(2)
    return -(offset.square().sum(-1) + 1.0).sqrt()


#: the parts of a bias
KINDS = (
    *("none", "term", "slope", "slope", "path", "tile", "slope slope", "slope path", "path slope slope"),
    *("distance", "distance", "distance slope", "path distance", "distance distance", "distance tile"),
    *("term slope", "slope term", "tile slope", "path tile", "path path", "none slope"),
)
_PARTS: dict[str, Callable[[random.Random, Sizes, str], RawBias]] = {
    "none": _none,
    "term": _term,
    "slope": _slope,
    "path": _path,
    "tile": _tile,
    "distance": _distance,
}
