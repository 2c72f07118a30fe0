"""Sequences of different lengths in one cache: each is computed alone, and kept aligned at its last token.

Padding never stands between two tokens of a sequence, so running sums and paths know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .columns import Columns

if TYPE_CHECKING:
    from .cache import StreamingCache


def attend_ragged(
    cache: StreamingCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    positions: Tensor | None,
    padding: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    """Append and attend, each sequence without its padding; rows of padding give zeros."""
    parts = _token_ranges(cache, q, padding)
    pieces = [one_sequence(cache, b) for b in range(q.shape[0])]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        if part.start == part.stop:
            continue
        one = slice(b, b + 1)
        where = None if positions is None else positions.expand(q.shape[0], -1)[one, part]
        inputs = (tensor[one, :, part] for tensor in (q, k, v))
        given = None if x is None else x[one, part]
        out[one, :, part] = piece.attend(*inputs, x=given, positions=where, **options)
    assemble(cache, pieces)
    return out


def _token_ranges(cache: StreamingCache, q: Tensor, padding: Tensor) -> list[slice]:
    if padding.shape != (q.shape[0], q.shape[2]) or padding.dtype != torch.bool:
        raise ValueError(
            f"padding must be bool of shape {(q.shape[0], q.shape[2])}, True where there is no token; "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    if cache.window is not None:
        raise ValueError("padding cannot be combined with a window; give each sequence its own cache")
    ranges = []
    for hidden in padding:
        tokens = torch.nonzero(~hidden).flatten().tolist()
        if tokens and tokens[-1] - tokens[0] + 1 != len(tokens):
            raise ValueError("padding must be on the left or the right of the tokens, not between them")
        ranges.append(slice(tokens[0], tokens[-1] + 1) if tokens else slice(0, 0))
    return ranges


def one_sequence(cache: StreamingCache, b: int) -> StreamingCache:
    """Sequence b alone, its padding removed."""
    piece = cache.fork().select(torch.tensor([b]))
    if piece.template is not None and piece.ragged:
        kept = torch.nonzero(~piece.tokens.view("padding")[0, 0]).flatten()
        piece.tokens.map(lambda _, t: t[:, :, : piece.tokens.length].index_select(2, kept.to(t.device)))
        piece.tokens.length = piece.length = len(kept)
        piece.ragged = False
    return piece


def assemble(cache: StreamingCache, pieces: Sequence[StreamingCache]) -> None:
    """All sequences in one table, aligned at the right, the missing left marked as padding."""
    full = [piece for piece in pieces if piece.template is not None]
    if len(full) < len(pieces):
        raise ValueError("every sequence needs at least one token before it can be padded")
    length = max(piece.tokens.length for piece in full)
    tail = max(piece.states.length for piece in full)
    tokens, states = Columns(cache.tokens.capacity), Columns(None, cache.states.keep_last)
    tokens.append({n: _align([p.tokens for p in full], n, length) for n in full[0].tokens.storage})
    states.append({n: _align([p.states for p in full], n, tail) for n in full[0].states.storage})
    cache.tokens, cache.states, cache.length = tokens, states, length
    cache.template, cache.aliases = full[0].template, full[0].aliases
    cache.next_position = torch.cat([p.next_position for p in full])  # type: ignore[misc]
    cache.key_bound = torch.cat([p.key_bound for p in full])  # type: ignore[misc]
    cache.contiguous = all(piece.contiguous for piece in full)
    cache.ragged = len({piece.tokens.length for piece in full}) > 1


def _align(tables: Sequence[Columns], name: str, length: int) -> Tensor:
    """One column of all sequences, aligned at the right; on the left zeros, or True for padding."""
    parts = []
    for table in tables:
        held = table.view(name)
        filler = held.new_full((*held.shape[:2], length - held.shape[2], *held.shape[3:]), name == "padding")
        parts.append(torch.cat([filler, held], 2))
    return torch.cat(parts, 0)
