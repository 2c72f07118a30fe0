"""The layout of the tokens of a call: positions, packed documents and padding. Made once for all layers.

Padding is removed before anything is computed: `pack` moves the tokens of each sequence to the front and `unpack`
moves the results back. So padding, wherever it is, does not change positions, running sums, paths or KV-shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..attention.masks import ID_DTYPES
from ..encodings.base import check_numbers
from ..encodings.prepared import Preparation, Prepared
from ..precision import exact_dtype
from .table import fit, take

if TYPE_CHECKING:
    from ..parallel import ContextParallel  # which imports torch.distributed


@dataclass(frozen=True, eq=False)
class Tail:
    """The end of the cached sequences, from which a call continues.

    Args:
        next: the next position of each sequence.
        lengths: the number of tokens of each sequence.
        document: the document id of each last token, (B,); None without packed documents.
    """

    next: list[float]
    lengths: list[int]
    document: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions, documents and padding of the T tokens of a call, in packed order: tokens first, then padding.

    Args:
        positions: (B|1, T), or (B|1, T, n) for n coordinates; None for 0 … T-1.
        documents: ids of packed documents, (B|1, T); None if there is one document.
        starts: (B|1, T), True at the first token of a document; None if no document starts here.
        padding: (B, T), True at padding, in the order of the call; None if there is none.
        order: indices (B, T) that pack; None if all padding is already last.
        back: indices (B, T) that unpack; None if all padding is already last.
        counts: number of tokens of each sequence, if there is padding; None under torch.compile.
        holes: indices of the padding of each sequence in the call, if there is any.
        next: the next position of each sequence; None with several coordinates.
        places: positions of the tokens of each sequence; None if they continue in steps of one.
        prepared: values that all layers share, in a call with few tokens and no gradients; else None.
        parallel: the ranks that share each sequence. The tokens are then those of this rank.
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
        """Return the layout with `prepared` for tokens of this dtype. The arguments of the call must be checked."""
        prepared = preparation(self.positions, dtype)
        return self if prepared is None else replace(self, prepared=prepared)

    def pack(self, x: Tensor, dim: int = 1) -> Tensor:
        """Move the tokens of x along `dim` before the padding."""
        return x if self.order is None else take(x, self.order, dim)

    def unpack(self, y: Tensor, dim: int = 1) -> Tensor:
        """Move the tokens of y along `dim` back to the order of the call, with zeros at padding."""
        if self.padding is None:
            return y
        if self.back is not None:
            y = take(y, self.back, dim)
        return y.masked_fill(fit(self.padding, y, dim), 0.0)

    @classmethod
    def from_documents(cls, documents: Tensor) -> Layout:
        """The layout of packed documents with these ids, (T,) or (B, T). Positions start at 0 in each document.

        It does not read values on the host, so torch.compile can trace it.
        """
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
    allow_restarts: bool = True,
) -> Layout:
    """Check the arguments and make the layout of `count` new tokens after `tail`.

    A document starts where the id in `documents` changes or, without ids, where `positions` do not increase. Values
    are read (a host sync) only if `positions`, `documents` or `padding` are given.

    Args:
        batch: number of sequences.
        count: number of new tokens.
        device: device of the layout's tensors.
        positions: (T,) or (B, T), with a last axis for several coordinates; by default they continue from `tail`.
        documents: ids of packed documents, (T,) or (B, T).
        padding: bool (B, T), True where there is no token.
        tail: the end of the cached sequences; None at the start.
        coords: number of coordinates of a position.
        allow_restarts: whether positions that do not increase start a document; if not, they raise a ValueError.

    Returns:
        The layout.
    """
    if tail is not None and len(tail.lengths) != batch:
        raise ValueError(
            f"the cache holds {len(tail.lengths)} sequences, the call has {batch}; select sequences, or use a new cache"
        )
    rows: list[float] = [0] * batch if tail is None else tail.next
    where = None if positions is None else checked(positions, "positions", batch, count, coords, device)
    ids = None if documents is None else checked(documents, "documents", batch, count, 1, device)
    if coords > 1 and (where is None or ids is not None):
        raise ValueError(
            f"an encoding with coords={coords} needs positions=… and does not support documents=…"
        )
    if not count:
        return Layout(_follow(rows[:1], 0, device) if where is None else where, next=rows)
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
        bad = (decreases(where, last) & ~starts) if not allow_restarts else starts
    else:
        assert where is not None
        where = where.expand(batch, -1)
        bad = starts = decreases(where, last)
        if packed or (allow_restarts and _any(starts, real)):
            ids = starts.cumsum(-1) + (tail.document.unsqueeze(-1) if packed else 0)  # type: ignore[union-attr]
    if not allow_restarts and _any(bad, real):
        raise ValueError(
            f"positions must continue from {rows} and increase, got {where.tolist()}; to go back, crop the "
            "cache first; for packed documents pass documents=…"
        )
    ends, places = _ends(where, counts, rows)
    return Layout(where, ids, None if ids is None else starts, next=ends, places=places, **packing)


def _packing(padding: Tensor, batch: int, count: int) -> dict[str, Any]:
    """The fields of a layout that depend on padding; none if there is no padding."""
    check_kind(padding, "padding")
    if padding.shape != (batch, count) or padding.dtype != torch.bool:
        raise ValueError(
            f"padding must be a bool tensor of shape {(batch, count)}, True where there is no token, "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    if torch.compiler.is_compiling():
        return {"padding": padding, **packing_order(padding)}
    holes = [[i for i, hidden in enumerate(row) if hidden] for row in padding.tolist()]
    if not any(holes):
        return {}
    moved = any(row != list(range(count - len(row), count)) for row in holes)
    counts = [count - len(row) for row in holes]
    return {"padding": padding, "counts": counts, "holes": holes, **(packing_order(padding) if moved else {})}


def packing_order(padding: Tensor) -> dict[str, Tensor]:
    """The indices `order` and `back` of a layout."""
    order = padding.to(torch.uint8).argsort(dim=-1, stable=True)
    return {"order": order, "back": order.argsort(-1)}


def checked(tensor: Tensor, name: str, batch: int, count: int, coords: int, device: torch.device) -> Tensor:
    """Reshape positions or ids to (B|1, T, …), or raise a ValueError."""
    check_kind(tensor, name)
    axes = (coords,) if coords > 1 else ()
    rows = tensor[None] if tensor.dim() == 1 + len(axes) else tensor
    if rows.shape not in ((1, count, *axes), (batch, count, *axes)):
        raise ValueError(
            f"{name} must have shape {(count, *axes)} or {(batch, count, *axes)}, one for each new token, "
            f"got {tuple(tensor.shape)}"
        )
    if name == "documents":
        check_ids(tensor)
    else:
        check_numbers(tensor)
    return rows.to(device, None if rows.is_floating_point() else torch.int64)


def check_kind(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; use torch.tensor(…)")


def check_ids(documents: Tensor) -> None:
    if documents.dtype not in ID_DTYPES:
        raise ValueError(f"documents must be integer ids, got {documents.dtype}; number the documents")


def as_numbers(values: Sequence[float], device: torch.device) -> Tensor:
    """int64 if all are whole by type, else float64: whatever torch's default dtype."""
    whole = all(isinstance(value, int) for value in values)
    return torch.tensor(values, device=device, dtype=torch.int64 if whole else exact_dtype(device))


def _follow(rows: Sequence[float], count: int, device: torch.device) -> Tensor:
    """Positions that continue from `rows`, (B, T), or (1, T) if these are equal."""
    if len(set(rows)) <= 1:
        first = rows[0] if rows else 0
        if isinstance(first, int):
            return torch.arange(first, first + count, device=device)[None]
        rows = [first]
    return as_numbers(rows, device).unsqueeze(-1) + torch.arange(count, device=device)


def valid(counts: Tensor, count: int) -> Tensor:
    """(B, T), True at tokens and False at padding, in packed order."""
    return torch.arange(count, device=counts.device) < counts.unsqueeze(-1)


def _changes(ids: Tensor, tail: Tail | None) -> Tensor:
    """(B|1, T), True where a document starts. Tokens cached without ids have id 0."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    if tail is not None:
        last = torch.zeros_like(ids[:, 0]) if tail.document is None else tail.document
        cached = torch.tensor([n > 0 for n in tail.lengths], device=ids.device)
        starts[:, 0] = (ids[:, 0] != last) | ~cached
    return starts


def decreases(where: Tensor, last: Tensor | None) -> Tensor:
    """(B, T), True where positions do not increase; the first one is compared with `last`, (B,), if given."""
    starts = torch.zeros_like(where, dtype=torch.bool)
    starts[:, 1:] = where[:, 1:] <= where[:, :-1]
    if last is not None:
        starts[:, 0] = where[:, 0] <= last
    return starts


def _last(tail: Tail, device: torch.device) -> Tensor:
    """The position of each last token, (B,); -inf for a sequence without tokens."""
    last = [n - 1 if cached else float("-inf") for n, cached in zip(tail.next, tail.lengths, strict=True)]
    return as_numbers(last, device)


def _within(starts: Tensor, rows: Sequence[float] | None = None) -> Tensor:
    """Positions that start at 0 in each document. Before the first start they continue from `rows`."""
    token = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    first = torch.where(starts, token, -1).cummax(-1).values
    if rows is None:
        return token - first
    begin = as_numbers(rows, starts.device).unsqueeze(-1)
    return torch.where(first < 0, begin + token, token - first)


def _any(flags: Tensor, valid: Tensor | None) -> bool:
    """Whether any flag is set at a token. True under torch.compile, which cannot read values."""
    if torch.compiler.is_compiling():
        return True
    return bool((flags if valid is None else flags & valid).any())


def _ends(
    where: Tensor, counts: Sequence[int] | None, rows: Sequence[float]
) -> tuple[list[float] | None, list[list[float]] | None]:
    """The next position of each sequence; and all positions, or None if they continue in steps of one."""
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
