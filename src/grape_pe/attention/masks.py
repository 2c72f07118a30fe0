"""Which keys each query may see: causal order, window, packed documents, key padding, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..precision import readable

#: dtypes of document ids; torch computes little with the other integers
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one call. Never a T x T tensor: `tile` makes the part that is asked for.

    `documents` (B|1, Tk) are ids of packed sequences; `key_padding` (B, Tk) is True on padding.
    When query_length < key_length the last query stands at the last key. `sinks` is the number
    of initial keys visible outside the window. `key_bound` (B, Hkv) is an upper bound of |k|; it hides nothing.
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

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        causal: bool,
        window: int | None,
        documents: Tensor | None,
        cu_seqlens: Tensor | None,
        key_padding: Tensor | None,
        sinks: int,
        key_bound: Tensor | None,
    ) -> Masks:
        """The masks of a call of `attend`; raises a ValueError that names what is wrong."""
        batch, length = k.shape[0], k.shape[2]
        given = documents, cu_seqlens, key_padding, key_bound
        for name, x in zip(("documents", "cu_seqlens", "key_padding", "key_bound"), given, strict=True):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; use torch.tensor(…)")
            if x is not None:
                check_devices(q, {name: x})
        if cu_seqlens is not None:
            if documents is not None:
                raise ValueError("documents and cu_seqlens mean the same; give one of them")
            documents = documents_from_lengths(cu_seqlens, length)
        if q.shape[2] > length and (causal or documents is not None):
            what = "causal attention" if causal else "attention over documents"
            raise ValueError(f"{what} needs at least as many keys as queries, got {length} and {q.shape[2]}")
        check_window(window, sinks)
        if not isinstance(causal, (bool, int)):
            raise TypeError(f"causal must be True or False, got {type(causal).__name__}")
        window = None if window is None else min(window, 1 << 40)  # positions are added to it, in 64 bits
        if documents is not None:
            documents = _ids(documents, batch, length)
        if key_padding is not None and (
            key_padding.shape != (batch, length) or key_padding.dtype != torch.bool
        ):
            raise ValueError(
                f"key_padding must be bool of shape ({batch}, {length}), True on padding; "
                f"got {key_padding.dtype} {tuple(key_padding.shape)}"
            )
        if key_bound is not None:
            key_bound = _bound(key_bound, k)
        limits = causal, window, documents, key_padding, min(sinks, 1 << 40), key_bound
        return cls(q.shape[2], length, q.device, *limits)

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


def check_window(window: Any, sinks: Any) -> None:
    """Raise a ValueError unless these are a window and a number of initial keys that stay visible outside it."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(
            "window must be None or the number of tokens a token sees, itself included: an integer of at least 1; "
            f"got {window!r}"
        )
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        raise ValueError(f"sinks must be a number of first tokens, an integer of at least 0; got {sinks!r}")
    if sinks and window is None:
        raise ValueError(f"sinks={sinks} keeps the first tokens visible outside a window; set window as well")


def checked_scale(scale: Any, width: int) -> float:
    """The scale as a finite number; by default 1/sqrt(D)."""
    if scale is None:
        return width**-0.5
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}; multiply q by a tensor instead")
    if scale - scale != 0:  # NaN for an infinity
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _ids(documents: Tensor, batch: int, length: int) -> Tensor:
    ids = documents[None] if documents.dim() == 1 else documents
    if ids.shape not in ((1, length), (batch, length)) or ids.dtype not in ID_DTYPES:
        raise ValueError(
            f"documents must be integer ids of shape ({length},) or ({batch}, {length}), one for each "
            f"key; got {documents.dtype} {tuple(documents.shape)}"
        )
    return ids


def _bound(key_bound: Tensor, k: Tensor) -> Tensor:
    if key_bound.shape != k.shape[:2] or not key_bound.is_floating_point():
        raise ValueError(
            f"key_bound must be floating, of shape {tuple(k.shape[:2])}, a number for each key head; "
            f"got {key_bound.dtype} {tuple(key_bound.shape)}"
        )
    # a bound rounded to half precision, or here to float32, may be below the norm it was made from
    eps = max(torch.finfo(dtype).eps for dtype in (key_bound.dtype, torch.float32))
    return key_bound.float() * (1 + eps)


def check_devices(q: Tensor, others: Mapping[str, Tensor | None], of: str = "") -> None:
    """The kernels read addresses: a tensor on another device must be an error before anything is read."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}{of} is on {tensor.device} but q is on {q.device}; move one of them")


def documents_from_lengths(cu_seqlens: Tensor, length: int) -> Tensor:
    """(1, length) ids from the cumulative lengths (0, n1, n1+n2, …, length) of packed sequences."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be a 1-D integer tensor (0, n1, n1 + n2, …, tokens), "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or sorted(ends) != ends:
            raise ValueError(f"cu_seqlens must rise from 0 to the {length} keys, got {ends[:4]} … {ends[-1]}")
    token = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)[None]


def finite_tokens(*tensors: Tensor) -> Tensor:
    """(B, H, T): tokens whose features are all finite in every (B, H, T, D) tensor.

    The rule all implementations keep: a query, or a visible key or value, that is not finite makes its rows
    NaN; one that no query sees changes nothing.
    """
    return torch.stack([x.isfinite().all(-1) for x in tensors]).all(0)
