"""Where new tokens stand: positions, packed documents, padding. Made once a call, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tail:
    """The last token that came before, of each sequence: (B,) each."""

    next_position: Tensor
    document: Tensor
    padded: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Of T new tokens: `positions` (B|1, T), None for 0 … T-1; `documents` (B|1, T) integer ids of packed
    sequences; `padding` (B, T), True where there is no token; `starts` (B|1, T), True where a sequence
    begins afresh. None means there is nothing of the kind.
    """

    positions: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def from_documents(cls, documents: Tensor) -> Layout:
        """Positions start again at 0 with every document. Without any look at values, so compilable."""
        ids = documents[None] if documents.dim() == 1 else documents
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        token = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        first = torch.where(starts, token, 0).cummax(-1).values
        return cls(token - first, ids, None, starts)

    @classmethod
    def from_positions(cls, positions: Tensor, padding: Tensor | None, tail: Tail | None) -> Layout:
        """A document begins where positions do not increase; after padding a sequence begins too."""
        rows = positions.shape[0] if padding is None else padding.shape[0]
        positions = positions.expand(rows, -1)
        hidden = torch.zeros_like(positions, dtype=torch.bool) if padding is None else padding
        before, was_hidden = _shifted(positions, hidden, tail)
        resets = positions <= before
        starts = resets | was_hidden
        packed = _maybe(resets & ~hidden & ~was_hidden)
        first = 0 if tail is None else tail.document.unsqueeze(-1)
        documents = first + starts.cumsum(-1) if packed else None
        known = padding if padding is not None and _maybe(padding) else None
        return cls(positions, documents, known, starts if packed or known is not None else None)


def _shifted(positions: Tensor, hidden: Tensor, tail: Tail | None) -> tuple[Tensor, Tensor]:
    """The position of the token before each token, and whether it was padding."""
    if tail is None:
        first, first_hidden = positions[:, :1] - 1, torch.zeros_like(hidden[:, :1])
    else:
        first, first_hidden = tail.next_position.unsqueeze(-1) - 1, tail.padded.unsqueeze(-1)
        first = first.to(positions.dtype).expand(positions.shape[0], 1)
        first_hidden = first_hidden.expand(positions.shape[0], 1)
    return torch.cat([first, positions[:, :-1]], 1), torch.cat([first_hidden, hidden[:, :-1]], 1)


def _maybe(flags: Tensor) -> bool:
    """Whether any is set; while compiling the values are unknown, and the safe answer is yes."""
    return True if torch.compiler.is_compiling() else bool(flags.any())


def positions_from_mask(mask: Tensor) -> Tensor:
    """0, 1, 2, … over the tokens of a (B, T) mask that is 0 on padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
