"""Who sees whom: causal order, sliding window, packed documents, key padding, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Masks:
    """What hides keys from queries. Never a T x T tensor: `tile` makes the part that is asked for.

    `documents` (B|1, Tk) are ids of packed sequences; `key_padding` (B, Tk) is True on padding.
    When query_length < key_length the last query stands at the last key.
    """

    query_length: int
    key_length: int
    device: torch.device
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    key_padding: Tensor | None = None

    @property
    def shift(self) -> int:
        """Index of the token at which query row 0 stands."""
        return self.key_length - self.query_length

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """True where the key is visible: (B|1, 1, rows, cols)."""
        t = torch.arange(rows.start, rows.stop, device=self.device).unsqueeze(-1) + self.shift
        j = torch.arange(cols.start, cols.stop, device=self.device)
        visible = torch.ones(t.shape[0], j.shape[0], dtype=torch.bool, device=self.device)
        if self.causal:
            visible = visible & (j <= t)
        if self.window is not None:
            visible = visible & ((t - j).abs() < self.window)
        visible = visible[None, None]
        if self.documents is not None:
            ours = self.documents[:, rows.start + self.shift : rows.stop + self.shift]
            visible = visible & (ours[:, None, :, None] == self.documents[:, None, None, cols])
        if self.key_padding is not None:
            visible = visible & ~self.key_padding[:, None, None, cols]
        return visible
