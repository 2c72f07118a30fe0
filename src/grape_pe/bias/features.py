"""Biases defined by a function of per-token features: `TileBias`, `ProductBias` and `ScoreBias`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..precision import exact_dtype, without_autocast, working_dtype
from .base import Bias, check_tensor, of_rows

ScoreFunction = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class _Features(Bias):
    """Base class: a function, and its per-token features by name."""

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
        for tensors, tokens in ((self.query_tensors(), (1, queries)), (self.key_tensors(), (keys,))):
            for name, x in tensors.items():
                check_tensor(name, x, (1, batch), *self._shape(x, heads, tokens))

    def _shape(self, x: Tensor, heads: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Sizes allowed for the axes after the batch; features of a `TileBias` may have any number of heads."""
        return [(x.shape[1],), tokens, *((size,) for size in x.shape[3:])]

    def _checked(self, tile: Tensor, rows: slice, cols: slice) -> Tensor:
        """Check the tile that the function returned, and give it four axes."""
        if isinstance(tile, Tensor) and not tile.is_complex():
            four = tile[(None,) * (4 - tile.dim())]
            want = rows.stop - rows.start, cols.stop - cols.start
            if four.dim() == 4 and all(
                size == 1 or size == n for size, n in zip(four.shape[2:], want, strict=True)
            ):
                return four
        got = f"{tile.dtype} {tuple(tile.shape)}" if isinstance(tile, Tensor) else type(tile).__name__
        raise ValueError(
            f"the function of a {type(self).__name__} must return numbers (B|1, H|1, {rows.stop - rows.start}, "
            f"{cols.stop - cols.start}) for the queries {rows.start}:{rows.stop} and the keys "
            f"{cols.start}:{cols.stop}, got {got}"
        )

    def query_tensors(self) -> dict[str, Tensor]:
        return {f"query.{name}": tensor for name, tensor in self.query.items()}

    def key_tensors(self) -> dict[str, Tensor]:
        return {f"key.{name}": tensor for name, tensor in self.key.items()}

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        query = {name: tensors.get(f"query.{name}", tensor) for name, tensor in self.query.items()}
        key = {name: tensors.get(f"key.{name}", tensor) for name, tensor in self.key.items()}
        return replace(self, query=query, key=key)


@dataclass(frozen=True, eq=False)
class TileBias(_Features):
    """A bias computed by tiles, with any function of per-token features: radial distance, PaTH, your own.

    Args:
        function: `function(rows, cols, query, key)` returns the tile (B|1, H|1, rows, cols) from the slices `rows`
            and `cols` and the whole features. It must be differentiable torch code. It runs with autocast off.
        query: query-side features by name, each (B|1, H|1, T, …).
        key: key-side features by name, each (B|1, H|1, T, …).
        scale: None if the function returns logits. A number if it returns products that are scaled like <q, k>:
            `attend` replaces this number by its own scale.
        pairwise: whether b(t, j) depends on the features of these two tokens only, not on tokens in between.
            A cache with sinks needs this, because it drops tokens in between.
        positions: names of the key features that are positions, so that a cache can shift them; None if the bias
            does not define a position shift.
        gain: factor of the scale that `attend` sets. A composition sets it if another part widened q and k.
    """

    scale: float | None = None
    pairwise: bool = False
    positions: tuple[str, ...] | None = None
    gain: float = 1.0

    def tile(self, rows: slice, cols: slice) -> Tensor:
        tensors = [*self.query.values(), *self.key.values()]
        with without_autocast(tensors[0]) if tensors else contextlib.nullcontext():
            tile = self._checked(self.function(rows, cols, self.query, self.key), rows, cols)
        return tile if self.scale is None else self.scale * tile

    def at_scale(self, scale: float) -> TileBias:
        return self if self.scale is None else replace(self, scale=scale * self.gain)

    def with_gain(self, gain: float) -> TileBias:
        return replace(self, gain=gain)

    def rebased(self, offset: float) -> TileBias:
        if self.positions is None:
            return super().rebased(offset)
        return replace(self, key={**self.key, **{name: self.key[name] - offset for name in self.positions}})

    def products(self, rows: slice, cols: slice) -> Tensor:
        """scale * <q, k> for all heads, of the features named q, (B, H, T, D), and k, (B, Hkv, T, D)."""
        assert self.scale is not None
        q, k = self.query["q"][:, :, rows], self.key["k"][:, :, cols]
        wide = working_dtype(q.dtype)
        return self.scale * (q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).mT)


@dataclass(frozen=True, eq=False)
class ProductBias(TileBias):
    """A `TileBias` whose function also reads the products of q and k: CoPE, DAPE.

    The arguments are those of `TileBias`, with these differences: `function(products, rows, cols, query, key)`
    returns logits, where `products(rows, cols)` are the scaled products <q, k> of a tile for all heads,
    (B, H, rows, cols). The query features must include q and the key features k; `scale` must be a number.
    """

    def tile(self, rows: slice, cols: slice) -> Tensor:
        with without_autocast(self.key["k"]):
            tile = self.function(self.products, rows, cols, self.query, self.key)
        return self._checked(tile, rows, cols)


@dataclass(frozen=True, eq=False)
class ScoreBias(_Features):
    """A bias computed pair by pair, with your own function: b(t, j) = function(t, j, query, key).

    The function must be elementwise torch code that broadcasts: `blocks` calls it on whole tiles, and FlexAttention
    compiles it. It receives the token indices t of the query and j of the key, as integer tensors, and the features
    of both tokens by name. In a cache that drops old keys the indices change, but t - j does not; sinks are not
    possible. Queries and keys need at least one feature each, which defines the number of tokens.

    Args:
        function: as above.
        query: query-side features by name, each (B|1, H|1, T), or (B|1, H|1, 1) beside one with T.
        key: key-side features by name, each (B|1, H|1, T).
    """

    function: ScoreFunction

    def __post_init__(self) -> None:
        if not self.query or not self.key:
            raise ValueError(
                "a ScoreBias needs at least one query feature and one key feature, each (B|1, H|1, T), "
                f"got query={[*self.query]} and key={[*self.key]}"
            )
        super().__post_init__()

    def _shape(self, x: Tensor, heads: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(1, heads), tokens]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        device = next(iter(self.key.values())).device
        shift = (self.key_length or 0) - (self.query_length or 0)
        t = torch.arange(rows.start + shift, rows.stop + shift, device=device).view(1, 1, -1, 1)
        j = torch.arange(cols.start, cols.stop, device=device).view(1, 1, 1, -1)
        query = {name: of_rows(x, rows).unsqueeze(-1) for name, x in self.query.items()}
        key = {name: x[:, :, cols].unsqueeze(-2) for name, x in self.key.items()}
        tile = self.function(t, j, query, key)
        if isinstance(tile, (int, float)):
            tile = torch.full((), tile, dtype=exact_dtype(device), device=device)
        return self._checked(tile, rows, cols).expand(-1, -1, t.shape[2], j.shape[3])
