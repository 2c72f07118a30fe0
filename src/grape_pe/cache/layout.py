"""Where the tokens of one call stand: positions, packed documents, padding. Made once for all layers.

Padding is taken out before anything is computed: the tokens of each sequence are moved to the front
(`pack`) and the results back to where they came from (`unpack`). So positions, running sums, paths and
shifted neighbours never see it, wherever it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..encodings.prepared import Preparation, Prepared
from .table import fit, take

if TYPE_CHECKING:
    from ..parallel import ContextParallel  # which imports torch.distributed


@dataclass(frozen=True, eq=False)
class Tail:
    """Where a cache stands: for each sequence the position that follows and the number of tokens; the last
    token's document (B,), None if nothing is packed."""

    next: list[float]
    lengths: list[int]
    document: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the T tokens of a call belong: those of each sequence first, then its padding.

    Args:
        positions: (B|1, T), or (B|1, T, n) for n coordinates; None for 0 … T-1.
        documents: (B|1, T) integer ids of packed sequences; None if there is one document.
        starts: (B|1, T), True at the first token of a document; None if none begins here.
        padding: (B, T), True where there is no token, in the order of the call; None if there is none.
        order: (B, T) indices that pack; None where tokens already come first.
        back: (B, T) indices that unpack; None where tokens already come first.
        counts: tokens of each sequence, if there is padding (unknown, None, under torch.compile).
        holes: where the padding of each sequence stood in the call, if there is any.
        next: the position that follows, for each sequence; None with several coordinates.
        places: positions of the tokens of each sequence, if they are not those that follow.
        prepared: what all layers share in a step of a few tokens without gradients; None in other calls.
        parallel: the ranks that share each sequence; the tokens are then those of this rank.
    """

    positions: Tensor | None = None
    documents: Tensor | None = None
    starts: Tensor | None = None
    padding: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    counts: list[int] | None = None
    holes: list[list[int]] | None = None
    next: list[float] | None = None
    places: list[list[float]] | None = None
    prepared: Prepared | None = None
    parallel: ContextParallel | None = None

    def prepare(self, preparation: Preparation, dtype: torch.dtype) -> Self:
        """The same layout with `prepared`, for tokens of this dtype; for calls whose arguments were checked."""
        prepared = preparation(self.positions, dtype)
        return self if prepared is None else replace(self, prepared=prepared)

    def pack(self, x: Tensor, dim: int = 1) -> Tensor:
        """Tokens of x along `dim` in the order of this layout."""
        return x if self.order is None else take(x, self.order, dim)

    def unpack(self, y: Tensor, dim: int = 1) -> Tensor:
        """Back in the order of the call; zeros at padding."""
        if self.padding is None:
            return y
        if self.back is not None:
            y = take(y, self.back, dim)
        return y.masked_fill(fit(self.padding, y, dim), 0.0)

    @classmethod
    def from_documents(cls, documents: Tensor) -> Layout:
        """Positions start again at 0 with every document. Reads no values, so it compiles."""
        ids = documents[None] if documents.dim() == 1 else documents
        starts = _changes(ids, None)
        return cls(_within(starts), ids, starts)


def arrange(
    batch: int,
    count: int,
    device: torch.device,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    tail: Tail | None = None,
    coords: int = 1,
    falls: bool = True,
) -> Layout:
    """The layout of `count` new tokens after `tail`, all arguments checked.

    A document begins where the id in `documents` changes or, without ids, where `positions` do not
    increase; with `falls=False` that is an error. Values are read (a host sync) only if `positions`,
    `documents` or `padding` are given.

    Args:
        batch: number of sequences.
        count: number of new tokens.
        device: of the tensors.
        positions: (T,), (B, T) or with a last axis of coordinates; by default those that follow `tail`.
        documents: (T,) or (B, T) ids of packed sequences.
        padding: (B, T) bool, True where there is no token.
        tail: the state of the sequences before these tokens; None at the start.
        coords: coordinates of a position.
        falls: positions that do not increase begin a document.
    """
    rows: list[float] = [0] * batch if tail is None else tail.next
    where = None if positions is None else checked(positions, "positions", batch, count, coords, device)
    ids = None if documents is None else checked(documents, "documents", batch, count, 1, device)
    if coords > 1 and (where is None or ids is not None):
        raise ValueError(f"an encoding with coords={coords} needs positions=, and takes no documents=")
    if not count:
        return Layout(torch.zeros(1, 0, device=device) if where is None else where, next=rows)
    packing = {} if padding is None else _packing(padding, batch, count)
    order, counts = packing.get("order"), packing.get("counts")
    if order is not None:
        where, ids = (None if t is None else take(t, order, 1) for t in (where, ids))
    if coords > 1:
        return Layout(where, **packing)
    packed = tail is not None and tail.document is not None
    if where is None and ids is None:
        if packed:
            ids = tail.document.unsqueeze(-1).expand(-1, count)  # type: ignore[union-attr]
        after = [n + c for n, c in zip(rows, counts or [count] * batch, strict=True)]
        return Layout(_follow(rows, count, device), ids, next=after, **packing)
    last = None if tail is None else _last(tail, device)
    real = None if counts is None else valid(torch.tensor(counts, device=device), count)
    if ids is not None:
        starts = _changes(ids.expand(batch, -1), tail)
        where = _within(starts, rows) if where is None else where.expand(batch, -1)
        bad = (drops(where, last) & ~starts) if not falls else starts
    else:
        assert where is not None
        where = where.expand(batch, -1)
        bad = starts = drops(where, last)
        if packed or (falls and _any(starts, real)):
            ids = starts.cumsum(-1) + (tail.document.unsqueeze(-1) if packed else 0)  # type: ignore[union-attr]
    if not falls and _any(bad, real):
        raise ValueError(
            f"positions must continue from {rows} and increase, got {where.tolist()}; to go back, crop the "
            "cache first, and for packed sequences give documents="
        )
    ends, places = _ends(where, counts, rows)
    return Layout(where, ids, None if ids is None else starts, next=ends, places=places, **packing)


def _packing(padding: Tensor, batch: int, count: int) -> dict[str, Any]:
    """What a layout keeps of padding; nothing if there is none."""
    if padding.shape != (batch, count) or padding.dtype != torch.bool:
        raise ValueError(
            f"padding must be bool of shape {(batch, count)}, True where there is no token; "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    if torch.compiler.is_compiling():
        return {"padding": padding, **moves(padding)}
    holes = [[i for i, hidden in enumerate(row) if hidden] for row in padding.tolist()]
    if not any(holes):
        return {}
    moved = any(row != list(range(count - len(row), count)) for row in holes)
    counts = [count - len(row) for row in holes]
    return {"padding": padding, "counts": counts, "holes": holes, **(moves(padding) if moved else {})}


def moves(padding: Tensor) -> dict[str, Tensor]:
    """Indices that put tokens before padding, and back."""
    order = padding.to(torch.uint8).argsort(dim=-1, stable=True)
    return {"order": order, "back": order.argsort(-1)}


def checked(tensor: Tensor, name: str, batch: int, count: int, coords: int, device: torch.device) -> Tensor:
    """Positions or ids as (B|1, T, …)."""
    axes = (coords,) if coords > 1 else ()
    rows = tensor[None] if tensor.dim() == 1 + len(axes) else tensor
    if rows.shape not in ((1, count, *axes), (batch, count, *axes)):
        raise ValueError(
            f"{name} must be of shape {(count, *axes)} or {(batch, count, *axes)}, one for each new token; "
            f"got {tuple(tensor.shape)}"
        )
    return rows.to(device)


def _follow(rows: Sequence[float], count: int, device: torch.device) -> Tensor:
    """Positions that go on from `rows`: (1, T) if all sequences stand at the same one."""
    if len(set(rows)) <= 1:
        first = rows[0] if rows else 0
        return torch.arange(first, first + count, device=device)[None]
    return torch.tensor(rows, device=device).unsqueeze(-1) + torch.arange(count, device=device)


def valid(counts: Tensor, count: int) -> Tensor:
    """(B, T), True at tokens, in packed order."""
    return torch.arange(count, device=counts.device) < counts.unsqueeze(-1)


def _changes(ids: Tensor, tail: Tail | None) -> Tensor:
    """(B|1, T): where a document begins. A cache that is not packed holds document 0."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    if tail is not None:
        last = torch.zeros_like(ids[:, 0]) if tail.document is None else tail.document
        cached = torch.tensor([n > 0 for n in tail.lengths], device=ids.device)
        starts[:, 0] = (ids[:, 0] != last) | ~cached
    return starts


def drops(where: Tensor, last: Tensor | None) -> Tensor:
    """(B, T): where positions do not increase, from `last` (B,) on; the first may stand anywhere without it."""
    starts = torch.zeros_like(where, dtype=torch.bool)
    starts[:, 1:] = where[:, 1:] <= where[:, :-1]
    if last is not None:
        starts[:, 0] = where[:, 0] <= last
    return starts


def _last(tail: Tail, device: torch.device) -> Tensor:
    """(B,): the position of the last token; a sequence without tokens may begin anywhere."""
    last = [n - 1 if cached else float("-inf") for n, cached in zip(tail.next, tail.lengths, strict=True)]
    return torch.tensor(last, device=device)


def _within(starts: Tensor, rows: Sequence[float] | None = None) -> Tensor:
    """Positions counted from the start of each document; before the first start they go on from `rows`."""
    token = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    first = torch.where(starts, token, -1).cummax(-1).values
    if rows is None:
        return token - first
    begin = torch.tensor(rows, device=starts.device).unsqueeze(-1)
    return torch.where(first < 0, begin + token, token - first)


def _any(flags: Tensor, valid: Tensor | None) -> bool:
    """Whether any is set at a token; while compiling values are unknown, and the safe answer is yes."""
    if torch.compiler.is_compiling():
        return True
    return bool((flags if valid is None else flags & valid).any())


def _ends(
    where: Tensor, counts: Sequence[int] | None, rows: Sequence[float]
) -> tuple[list[float] | None, list[list[float]] | None]:
    """The position that follows in each sequence; and all positions, unless they went on in steps of one."""
    if torch.compiler.is_compiling():
        return None, None
    places = where.tolist()
    if counts is not None:
        places = [row[:n] for row, n in zip(places, counts, strict=True)]
    after = [row[-1] + 1 if row else start for row, start in zip(places, rows, strict=True)]
    follows = all(
        row == [start + i for i in range(len(row))] for row, start in zip(places, rows, strict=True)
    )
    return after, None if follows else places
