"""Which keys each query may see: causal order, window, packed documents, key padding, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one call. Never a T x T tensor: `tile` makes the part that is asked for.

    `documents` (B|1, Tk) are ids of packed sequences; `key_padding` (B, Tk) is True on padding.
    When query_length < key_length the last query stands at the last key. The first `sinks` keys stay
    visible whatever the window. `key_bound` (B, Hkv) is an upper bound of |k|; it hides nothing.
    """

    query_length: int
    key_length: int
    device: torch.device
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    key_padding: Tensor | None = None
    sinks: int = 0
    key_bound: Tensor | None = None

    @property
    def shift(self) -> int:
        """Index of the token at which query row 0 stands."""
        return self.key_length - self.query_length

    @property
    def plain(self) -> bool:
        """Only causal order, or nothing at all."""
        return self.window is None and self.documents is None and self.key_padding is None

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of mask in use."""
        used = {
            "causal": self.causal,
            "window": self.window is not None,
            "documents": self.documents is not None,
            "padding": self.key_padding is not None,
        }
        return tuple(name for name, on in used.items() if on)

    def columns(self, rows: slice) -> slice:
        """The contiguous range of keys that causal order and window leave to these rows."""
        first, end = 0, self.key_length
        if self.window is not None and not self.sinks:
            first = max(first, rows.start + self.shift - self.window + 1)
            end = min(end, rows.stop + self.shift + self.window - 1)
        if self.causal:
            end = min(end, rows.stop + self.shift)
        return slice(min(first, self.key_length), max(end, min(first, self.key_length)))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """True where the key is visible: (B|1, 1, rows, cols)."""
        t = torch.arange(rows.start, rows.stop, device=self.device).unsqueeze(-1) + self.shift
        j = torch.arange(cols.start, cols.stop, device=self.device)
        visible = torch.ones(t.shape[0], j.shape[0], dtype=torch.bool, device=self.device)
        if self.causal:
            visible = visible & (j <= t)
        if self.window is not None:
            visible = visible & (((t - j).abs() < self.window) | (j < self.sinks))
        visible = visible[None, None]
        if self.documents is not None:
            ours = self.documents[:, rows.start + self.shift : rows.stop + self.shift]
            visible = visible & (ours[:, None, :, None] == self.documents[:, None, None, cols])
        if self.key_padding is not None:
            visible = visible & ~self.key_padding[:, None, None, cols]
        return visible


def documents_from_lengths(cu_seqlens: Tensor, length: int) -> Tensor:
    """(1, length) ids from the cumulative lengths (0, n1, n1+n2, …, length) of packed sequences."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be a 1-D integer tensor (0, n1, n1 + n2, …, tokens), "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or sorted(ends) != ends:
            raise ValueError(f"cu_seqlens must rise from 0 to the {length} keys, got {ends[:4]} … {ends[-1]}")
    token = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)[None]


def readable(x: Tensor) -> bool:
    """Whether Python may look at its values: not while torch.compile traces, nor on meta or fake tensors."""
    return not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))


def finite_tokens(*tensors: Tensor) -> Tensor:
    """(B, H, T): tokens whose features are all finite in every (B, H, T, D) tensor.

    The rule all implementations keep: a query, or a visible key or value, that is not finite makes its rows
    NaN; one that no query sees changes nothing.
    """
    return torch.stack([x.isfinite().all(-1) for x in tensors]).all(0)
