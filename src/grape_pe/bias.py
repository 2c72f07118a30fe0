"""How two tokens' traces make an additive logit: a closed set of frozen dataclasses.

Letters: B batch, H query heads, T tokens (Tq queries, Tk keys), P probe features. Every kind

- makes any tile b[rows, cols] (`tile`), which is all the reference attention needs;
- can be cut along queries (`queries`) and keys (`keys`), and continued along keys (`extend`),
  which is all a cache needs;
- adds to any other (`+`).

When Tq < Tk the last query stands at the last key, so query row r is the token r + Tk - Tq.
A bias is never scaled by 1/sqrt(D), and non-positive wherever rates are non-negative and j <= t. The
exception is a `TileBias` of products that stand in place of <q, k> (PaTH): it has a `scale`, which `attend` sets
to its own through `at_scale`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .groups import PlaneRotation
from .precision import exact_dtype, without_autocast, working_dtype

Link = Literal["logsigmoid", "bounded"]
ProbeRotation = Literal["key", "relative", "none"]
TileFunction = Callable[[slice, slice, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
LogitFunction = Callable[[slice, slice], Tensor]
ScoreFunction = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]

# Links g of Eq. P1: increasing, 1-Lipschitz, below 0. "bounded" is sigmoid - 1, so an edge costs at
# most its rate.
LINKS: dict[Link, Callable[[Tensor], Tensor]] = {
    "logsigmoid": F.logsigmoid,
    "bounded": lambda z: -torch.sigmoid(-z),
}


class Bias:
    """Base of the closed set: a kind makes tiles and says which tensors run along queries and keys."""

    def tile(self, rows: slice, cols: slice) -> Tensor | None:
        """b[rows, cols] as (B or 1, H or 1, rows, cols); None stands for zero."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def row(self, keys: int) -> Tensor | None:
        """The tile of a single query and all its `keys`: (B|1, H|1, 1, keys)."""
        return self.tile(slice(0, 1), slice(0, keys))

    def views(self) -> dict[str, Tensor]:
        """What belongs to queries, by name: (B|1, H|1, Tq|1, …)."""
        return {}

    def traces(self) -> dict[str, Tensor]:
        """What tokens leave behind for later queries, by name: (B|1, H|1, Tk, …). A cache keeps these."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return self.views() | self.traces()

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same bias with some of its views or traces exchanged."""
        raise TypeError(f"{type(self).__name__} is abstract: use one of the kinds in grape_pe.bias")

    def dense(self) -> Tensor | None:
        """The whole Tq x Tk bias: for looking at, never for computing with."""
        return self.tile(slice(0, self.query_length or 0), slice(0, self.key_length or 0))

    @property
    def query_length(self) -> int | None:
        """Tq, or None when the bias fits any length."""
        return _length(self.views())

    @property
    def key_length(self) -> int | None:
        return _length(self.traces())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise a ValueError, saying which tensor, unless the bias belongs to attention of that shape."""
        _check_lengths(self.query_length, self.key_length, queries, keys)

    def queries(self, rows: slice) -> Self:
        """Keep the last queries. Any other part would not stand at the last key: make a `tile` of it."""
        length = self.query_length
        _check_tail("queries", rows, length)
        return self.replaced({n: t[:, :, rows] for n, t in self.views().items() if t.shape[2] == length})

    def keys(self, cols: slice) -> Self:
        """Drop the oldest keys. Exact: what a key leaves behind does not depend on the keys before it."""
        _check_tail("keys", cols, self.key_length)
        return self.replaced({name: trace[:, :, cols] for name, trace in self.traces().items()})

    def extend(self, later: Bias) -> Self:
        """This bias's keys followed by those of `later`, seen by the queries of `later`."""
        ours, theirs = self.traces(), later.traces()
        if type(later) is not type(self) or ours.keys() != theirs.keys():
            raise TypeError(
                f"a {type(self).__name__} with {list(ours)} can only be extended by its like, "
                f"got {type(later).__name__} with {list(theirs)}"
            )
        return later.replaced({name: _join(trace, theirs[name]) for name, trace in ours.items()})  # type: ignore[return-value]

    def rebased(self, offset: float) -> Self:
        """What the tokens would have left behind at positions smaller by `offset`.

        Exact by the group law where there is one; a kind that cannot raises a ValueError.
        """
        raise ValueError(
            f"a {type(self).__name__} cannot be moved to other positions: its features are its own business; "
            "keep the positions as they are"
        )

    def at_scale(self, scale: float) -> Self:
        """The same bias in attention with this scale of <q, k>; `attend` asks for it before any `tile`."""
        return self

    def logits(self) -> LogitFunction | None:
        """A function of (rows, cols) that returns scale <q, k> + b, if that costs less than b alone; else None.

        What all tiles share is computed here, once for a call of attention.
        """
        return None

    def settled(self, last: int) -> Self:
        """The same for queries after all these keys, at less cost a query; the `last` keys stay as they are.

        A cache calls it now and then with what it holds, before new tokens come.
        """
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same bias with every tensor changed: moves, casts, batch selection."""
        return self.replaced({n: change(t) for n, t in self.tensors().items()})

    def __add__(self, other: Bias) -> Bias:
        return _sum([*parts_of(self), *parts_of(other)])


def _length(tensors: Mapping[str, Tensor]) -> int | None:
    """Tokens along the third axis; one stands for any number of them, except none."""
    sizes = [tensor.shape[2] for tensor in tensors.values()]
    return (0 if 0 in sizes else max(sizes)) if sizes else None


def _check_lengths(query_length: int | None, key_length: int | None, queries: int, keys: int) -> None:
    for what, have, want in (("queries", query_length, queries), ("keys", key_length, keys)):
        if have is not None and have != want:
            raise ValueError(
                f"the bias was made for {have} {what} but there are {want}; "
                "use bias.queries(…), bias.keys(…) or past.extend(bias) to fit it"
            )


def _check_tensor(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    """Each axis must have one of the one or two sizes allowed for it."""
    shape = tensor.shape
    fits = len(shape) == len(allowed)
    for n, sizes in zip(shape, allowed, strict=False):
        # torch.compile traces `==` of symbols, but not `in`
        fits = fits and (n == sizes[0] or n == sizes[-1])
    if not fits:
        wanted = ", ".join(" or ".join(map(str, sorted(set(sizes)))) for sizes in allowed)
        raise ValueError(f"{name} of the bias must be of shape ({wanted}), got {tuple(tensor.shape)}")


def _check_tail(what: str, part: slice, length: int | None) -> None:
    if length is not None and (part.stop not in (None, length) or part.step not in (None, 1)):
        raise ValueError(
            f"only the last {what} can be kept (the last query stands at the last key): the slice must end "
            f"at {length}, got {part}; use tile(rows, cols) for any other part"
        )


def _of_rows(x: Tensor, rows: slice) -> Tensor:
    """(B|1, H|1, T|1) at these queries."""
    return x if x.shape[2] == 1 else x[:, :, rows]


def _wide(rate: Tensor) -> Tensor:
    """At least float32: a distance of 1000 is rounded by up to 4 in bfloat16."""
    return rate.to(working_dtype(rate.dtype))


def _join(first: Tensor, second: Tensor) -> Tensor:
    """Along tokens; a trace shared by the batch or the heads is expanded when the other is not."""
    lead = torch.broadcast_shapes(first.shape[:2], second.shape[:2])
    return torch.cat([t.expand(*lead, *t.shape[2:]) for t in (first, second)], 2)


def parts_of(bias: Bias) -> tuple[Bias, ...]:
    return bias.parts if isinstance(bias, SumBias) else (bias,)


def terms_of(bias: Bias) -> tuple[SlopeTerm, ...]:
    if isinstance(bias, SlopeTerm):
        return (bias,)
    return bias.terms if isinstance(bias, SlopeBias) else ()


def _sum(parts: list[Bias]) -> Bias:
    """Slope terms concatenate, zeros vanish, the rest is kept side by side."""
    terms = tuple(term for part in parts for term in terms_of(part))
    slopes: list[Bias] = [SlopeBias(terms)] if terms else []
    others = [part for part in parts if not isinstance(part, (SlopeTerm, SlopeBias, NoBias))]
    kept = [*slopes, *others]
    if not kept:
        return NO_BIAS
    return kept[0] if len(kept) == 1 else SumBias(tuple(kept))


@dataclass(frozen=True, eq=False)
class NoBias(Bias):
    """Zero: NoPE and every pure rotation."""

    def tile(self, rows: slice, cols: slice) -> None:
        return None

    def replaced(self, tensors: Mapping[str, Tensor]) -> NoBias:
        return self

    def rebased(self, offset: float) -> NoBias:
        return self


NO_BIAS = NoBias()  # a global, because torch.compile can trace neither NoBias() nor a default of it


@dataclass(frozen=True, eq=False)
class SlopeTerm(Bias):
    """(rate_q[t] + rate_k[j]) * (c[j] - c[t]), one term of a `SlopeBias` (Eq. A5).

    `c_q` (B|1, H|1, Tq) and `c_k` (B|1, H|1, Tk) are the same coordinate seen from both sides, in
    float64 where it grows with the sequence; `rate_q` (B|1, H, Tq|1) and `rate_k` (B|1, H, Tk) may
    be None for zero. The difference is taken before the product, so nothing cancels at long range.
    `counts` says what c is: positions, or a running sum that knows nothing of positions.
    """

    c_q: Tensor
    c_k: Tensor
    rate_q: Tensor | None = None
    rate_k: Tensor | None = None
    counts: Literal["positions", "sum"] = "positions"

    def views(self) -> dict[str, Tensor]:
        return {"c_q": self.c_q} | ({} if self.rate_q is None else {"rate_q": self.rate_q})

    def traces(self) -> dict[str, Tensor]:
        return {"c_k": self.c_k} | ({} if self.rate_k is None else {"rate_k": self.rate_k})

    def replaced(self, tensors: Mapping[str, Tensor]) -> SlopeTerm:
        get = tensors.get
        rates = get("rate_q", self.rate_q), get("rate_k", self.rate_k)
        return SlopeTerm(get("c_q", self.c_q), get("c_k", self.c_k), *rates, self.counts)

    def rebased(self, offset: float) -> SlopeTerm:
        return replace(self, c_k=self.c_k - offset) if self.counts == "positions" else self

    def __post_init__(self) -> None:
        if self.rate_q is None and self.rate_k is None:
            raise ValueError("a SlopeTerm needs rate_q or rate_k (None means zero); got neither")

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        _check_lengths(self.c_q.shape[2], self.c_k.shape[2], queries, keys)
        shape = (1, batch), (1, heads)
        _check_tensor("c_q", self.c_q, *shape, (queries,))
        _check_tensor("c_k", self.c_k, *shape, (keys,))
        if self.rate_q is not None:
            _check_tensor("rate_q", self.rate_q, *shape, (1, queries))
        if self.rate_k is not None:
            _check_tensor("rate_k", self.rate_k, *shape, (keys,))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        offset = self.c_k[:, :, cols].unsqueeze(-2) - self.c_q[:, :, rows].unsqueeze(-1)
        rate: Tensor | float = 0.0
        if self.rate_q is not None:
            rate = rate + _wide(_of_rows(self.rate_q, rows)).unsqueeze(-1)
        if self.rate_k is not None:
            rate = rate + _wide(self.rate_k[:, :, cols]).unsqueeze(-2)
        assert isinstance(rate, Tensor)
        return rate * offset.to(rate.dtype)

    def row(self, keys: int) -> Tensor:
        rate = self.rate_k if self.rate_q is None else self.rate_q
        assert rate is not None
        rate = _wide(rate)
        if self.rate_q is not None and self.rate_k is not None:
            rate = rate + self.rate_k
        return (rate * (self.c_k - self.c_q).to(rate.dtype)).unsqueeze(2)


def _plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


class _Compound(Bias):
    """Several biases, added; their tensors are named "0.c_q", "1.probe_k" and so on."""

    def members(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def changed(self, change: Callable[[int, Any], Bias]) -> Self:
        """The same with each member changed, given its index."""
        return type(self)(tuple(change(i, part) for i, part in enumerate(self.members())))  # type: ignore[call-arg]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        total = None
        for (
            part
        ) in self.members():  # a comprehension would make the lengths of a slice constants in torch.compile
            total = _plus(total, part.tile(rows, cols))
        assert total is not None
        return total

    def row(self, keys: int) -> Tensor:
        total = None
        for part in self.members():
            total = _plus(total, part.row(keys))
        assert total is not None
        return total

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        for part in self.members():
            part.check(batch, heads, queries, keys)

    def views(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": x for i, part in enumerate(self.members()) for name, x in part.views().items()}

    def traces(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": x for i, part in enumerate(self.members()) for name, x in part.traces().items()
        }

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        split: list[dict[str, Tensor]] = [{} for _ in self.members()]
        for name, tensor in tensors.items():
            index, _, rest = name.partition(".")
            split[int(index)][rest] = tensor
        return self.changed(lambda i, part: part.replaced(split[i]))

    def rebased(self, offset: float) -> Self:
        return self.changed(lambda i, part: part.rebased(offset))


@dataclass(frozen=True, eq=False)
class SlopeBias(_Compound):
    """A sum of `SlopeTerm`s: ALiBi, FoX, GRAPE-A in all its gated forms, axis-aligned 2D/3D."""

    terms: tuple[SlopeTerm, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a SlopeBias needs at least one SlopeTerm; use NoBias() for zero")

    def members(self) -> tuple[SlopeTerm, ...]:
        return self.terms


@dataclass(frozen=True, eq=False)
class PathBias(Bias):
    """sum for l = j+1 … t of rate_h * g(<p_t, P_l> / P): the path integral of GRAPE-AP (Eq. P2).

    `probe_q` (B, Hp, Tq, P) and `probe_k` (B, Hp, Tk, P), the latter rotated on arrival, with Hp a
    divisor of H; `rate` (1, H, 1). The sum runs over tokens, and is empty (zero) for j >= t.
    `rotation` says which probes are turned by their position (Eq. P3).
    """

    probe_q: Tensor
    probe_k: Tensor
    rate: Tensor
    link: Link = "logsigmoid"
    rotation: ProbeRotation = "none"

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"link must be one of {', '.join(LINKS)}, got {self.link!r}")

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        _check_lengths(self.probe_q.shape[2], self.probe_k.shape[2], queries, keys)
        probes, features = self.probe_q.shape[1], self.probe_q.shape[-1]
        if probes == 0 or heads % probes:
            raise ValueError(f"probe heads must divide the {heads} query heads, got {probes}")
        _check_tensor("probe_q", self.probe_q, (1, batch), (probes,), (queries,), (features,))
        _check_tensor("probe_k", self.probe_k, (1, batch), (probes,), (keys,), (features,))
        _check_tensor("rate", self.rate, (1,), (heads,), (1,))

    def views(self) -> dict[str, Tensor]:
        return {"probe_q": self.probe_q, "rate": self.rate}

    def traces(self) -> dict[str, Tensor]:
        return {"probe_k": self.probe_k}

    def replaced(self, tensors: Mapping[str, Tensor]) -> PathBias:
        return replace(self, **tensors)  # type: ignore[arg-type]

    def queries(self, rows: slice) -> PathBias:
        _check_tail("queries", rows, self.query_length)
        return replace(self, probe_q=self.probe_q[:, :, rows])

    def rebased(self, offset: float) -> PathBias:
        if self.rotation == "none":
            return self
        if self.rotation == "key":
            raise ValueError(
                'with probe_rotation="key" the bias of grape-ap depends on absolute positions and cannot be '
                'moved; use probe_rotation="relative"'
            )
        width = self.probe_k.shape[-1]
        angle = torch.full((width // 2,), -float(offset), dtype=exact_dtype(self.probe_k.device))
        turn = PlaneRotation.from_angle(angle.to(self.probe_k.device), self.probe_k.dtype)
        return replace(self, probe_k=turn.apply(self.probe_k))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        shift = self.probe_k.shape[2] - self.probe_q.shape[2]
        first, last = cols.start + 1, max(rows.stop + shift, cols.stop + 1)
        probes = self.probe_k[:, :, first:last]
        wide = working_dtype(torch.promote_types(self.probe_q.dtype, probes.dtype))
        with without_autocast(probes):
            z = self.probe_q[:, :, rows].to(wide) @ probes.transpose(-1, -2).to(wide) / probes.shape[-1]
        token = torch.arange(first, first + probes.shape[2], device=z.device)
        t = torch.arange(rows.start + shift, rows.stop + shift, device=z.device)
        edge = LINKS[self.link](z).masked_fill(token > t.unsqueeze(-1), 0.0)
        # From the right: the sum over l = j+1 … t stands at l = j + 1, which is column j - cols.start.
        total = edge.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
        width = cols.stop - cols.start
        total = F.pad(total[..., :width], (0, max(0, width - total.shape[-1])))
        repeat = self.rate.shape[1] // total.shape[1]
        return self.rate.unsqueeze(-1) * total.to(z.dtype).repeat_interleave(repeat, 1)

    def row(self, keys: int) -> Tensor:
        probes = self.probe_k[:, :, 1:]
        wide = working_dtype(torch.promote_types(self.probe_q.dtype, probes.dtype))
        probe = self.probe_q.to(wide) / self.probe_q.shape[-1]
        with without_autocast(probes):
            edge = LINKS[self.link](probe @ probes.transpose(-1, -2).to(wide))
        # from the right, as in `tile`: the edges after each key
        total = F.pad(edge.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).to(wide), (0, 1))
        repeat = self.rate.shape[1] // total.shape[1]
        return self.rate.unsqueeze(-1) * (total if repeat == 1 else total.repeat_interleave(repeat, 1))


@dataclass(frozen=True, eq=False)
class _Features(Bias):
    """A user's function of features of tokens."""

    function: Callable[..., Tensor]
    query: Mapping[str, Tensor]
    key: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for side, features in (("query", self.query), ("key", self.key)):
            for name, x in features.items():
                if not isinstance(x, Tensor) or x.dim() < 3:
                    got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(
                        f"{side} feature {name!r} of a {type(self).__name__} must be a tensor of shape "
                        f"(B|1, H|1, T, …), got {got}"
                    )

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        super().check(batch, heads, queries, keys)
        for tensors, tokens in ((self.views(), (1, queries)), (self.traces(), (keys,))):
            for name, x in tensors.items():
                _check_tensor(name, x, (1, batch), *self._shape(x, heads, tokens))

    def _shape(self, x: Tensor, heads: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Sizes allowed after the batch; a function of tiles may group the heads as it likes."""
        return [(x.shape[1],), tokens, *((size,) for size in x.shape[3:])]

    def _checked(self, tile: Tensor, rows: slice, cols: slice) -> Tensor:
        for size, part in zip(tile.shape[-2:], (rows, cols), strict=False):
            if tile.dim() > 4 or not (size == 1 or size == part.stop - part.start):
                raise ValueError(
                    f"the function of a {type(self).__name__} must return (B|1, H|1, {rows.stop - rows.start}, "
                    f"{cols.stop - cols.start}) for the queries {rows.start}:{rows.stop} and the keys "
                    f"{cols.start}:{cols.stop}, got {tuple(tile.shape)}"
                )
        return tile

    def views(self) -> dict[str, Tensor]:
        return {f"query.{name}": tensor for name, tensor in self.query.items()}

    def traces(self) -> dict[str, Tensor]:
        return {f"key.{name}": tensor for name, tensor in self.key.items()}

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        query = {name: tensors.get(f"query.{name}", tensor) for name, tensor in self.query.items()}
        key = {name: tensors.get(f"key.{name}", tensor) for name, tensor in self.key.items()}
        return replace(self, query=query, key=key)


@dataclass(frozen=True, eq=False)
class TileBias(_Features):
    """Any function of a tile, given features of tokens: radial distance, PaTH, a user's own.

    `function(rows, cols, query, key)` gets the whole feature tensors, each (B|1, H|1, T, …), and
    returns (B|1, H|1, rows, cols). It must be differentiable torch code; it runs with autocast off.

    `scale`: None when the function returns logits, as every other kind of bias does. A number when it
    returns products of q and k, to be scaled like <q, k>: `attend` then puts its own scale in its place.
    """

    function: TileFunction
    scale: float | None = None

    def tile(self, rows: slice, cols: slice) -> Tensor:
        tensors = [*self.query.values(), *self.key.values()]
        with without_autocast(tensors[0]) if tensors else contextlib.nullcontext():
            tile = self._checked(self.function(rows, cols, self.query, self.key), rows, cols)
        return tile if self.scale is None else self.scale * tile

    def at_scale(self, scale: float) -> TileBias:
        return self if self.scale is None else replace(self, scale=scale)


@dataclass(frozen=True, eq=False)
class ScoreBias(_Features):
    """A function of one pair of tokens: b(t, j) = function(t, j, query, key), a user's own.

    `t` and `j` are the indices of the query's and the key's token, integer tensors; `query` and `key` are numbers of
    those tokens by name, each given as a (B|1, H|1, T) tensor, for queries also (B|1, H|1, 1) beside one of T. The
    function must be elementwise torch code that broadcasts: `blocks` calls it on whole tiles, FlexAttention compiles
    it for one pair at a time. Either side needs at least one feature, which tells the number of its tokens.
    """

    function: ScoreFunction

    def __post_init__(self) -> None:
        if not self.query or not self.key:
            raise ValueError("a ScoreBias needs a feature (B|1, H|1, T) of queries and one of keys; got none")
        super().__post_init__()

    def _shape(self, x: Tensor, heads: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(1, heads), tokens]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        device = next(iter(self.key.values())).device
        shift = (self.key_length or 0) - (self.query_length or 0)
        t = torch.arange(rows.start + shift, rows.stop + shift, device=device).view(1, 1, -1, 1)
        j = torch.arange(cols.start, cols.stop, device=device).view(1, 1, 1, -1)
        query = {name: _of_rows(x, rows).unsqueeze(-1) for name, x in self.query.items()}
        key = {name: x[:, :, cols].unsqueeze(-2) for name, x in self.key.items()}
        tile = torch.as_tensor(self.function(t, j, query, key), device=device)
        return self._checked(tile[(None,) * (4 - tile.dim())], rows, cols).expand(
            -1, -1, t.shape[2], j.shape[3]
        )


@dataclass(frozen=True, eq=False)
class SumBias(_Compound):
    """Biases of different kinds, added. Made by `+`, which merges what can be merged."""

    parts: tuple[Bias, ...]

    def members(self) -> tuple[Bias, ...]:
        return self.parts

    def at_scale(self, scale: float) -> SumBias:
        return self.changed(lambda i, part: part.at_scale(scale))

    def settled(self, last: int) -> SumBias:
        return SumBias(tuple(part.settled(last) for part in self.parts))

    def logits(self) -> LogitFunction | None:
        for i, part in enumerate(self.parts):
            logits = part.logits()
            if logits is not None:
                rest = SumBias((*self.parts[:i], *self.parts[i + 1 :]))
                return lambda rows, cols: logits(rows, cols) + rest.tile(rows, cols)
        return None

    def queries(self, rows: slice) -> SumBias:
        return self.changed(lambda i, part: part.queries(rows))
