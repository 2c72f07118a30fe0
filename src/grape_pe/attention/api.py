"""`attend`: one call for attention with any bias and any mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..bias import Bias, NoBias
from .masks import Masks
from .reference import attend_reference

Implementation = Callable[[Tensor, Tensor, Tensor, Bias, Masks, float], Tensor]
IMPLEMENTATIONS: dict[str, Implementation] = {"reference": attend_reference}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    key_padding: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale * q k^T + bias) v over the keys each query may see.

    Args:
        q: queries (B, H, Tq, D). k, v: keys (B, Hkv, Tk, D) and values (B, Hkv, Tk, Dv), with H a
            multiple of Hkv. When Tq < Tk the last query stands at the last key.
        bias: what `Encoding` returned, or a sum of such; None for zero. Never scaled.
        causal: a token sees itself and what came before.
        window: a token sees fewer than `window` tokens away, itself included.
        documents: (Tk,) or (B, Tk) integer ids of packed sequences; a token sees only its own.
        key_padding: (B, Tk) bool, True where the key is padding.
        scale: 1/sqrt(D) by default.
        impl: which implementation; "auto" chooses. A named one never falls back to another.

    Returns:
        (B, H, Tq, Dv) in v's dtype. A query that sees no key gets zeros.
    """
    bias = NoBias() if bias is None else bias
    _check_shapes(q, k, v)
    _check_bias(bias, q, k)
    masks = _masks(q, k, causal, window, documents, key_padding)
    return _choose(impl)(q, k, v, bias, masks, q.shape[-1] ** -0.5 if scale is None else scale)


def _choose(impl: str) -> Implementation:
    name = "reference" if impl == "auto" else impl
    if name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"impl must be one of {known}; got {impl!r}")
    return IMPLEMENTATIONS[name]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, tokens, features), got shape {tuple(tensor.shape)}; "
                "use view(B, T, H, D).transpose(1, 2) on a projection of width H * D"
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "q (B, H, Tq, D), k (B, Hkv, Tk, D) and v (B, Hkv, Tk, Dv) must share B and D, k and v also "
            f"Hkv and Tk; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them")


def _check_bias(bias: Bias, q: Tensor, k: Tensor) -> None:
    if not isinstance(bias, Bias):
        raise TypeError(
            f"bias must be one of the kinds in grape_pe.bias, got {type(bias).__name__}; "
            "wrap a function of tiles in TileBias"
        )
    lengths = (bias.query_length, bias.key_length)
    for what, have, want in zip(("queries", "keys"), lengths, (q.shape[2], k.shape[2]), strict=True):
        if have is not None and have != want:
            raise ValueError(
                f"the bias was made for {have} {what} but there are {want}; "
                "use bias.queries(…), bias.keys(…) or past.extend(bias) to fit it"
            )


def _masks(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
) -> Masks:
    batch, length = k.shape[0], k.shape[2]
    if causal and q.shape[2] > length:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {length} and {q.shape[2]}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window counts visible tokens and must be at least 1, got {window}")
    if documents is not None:
        if documents.dim() == 1:
            documents = documents[None]
        if documents.shape not in ((1, length), (batch, length)) or documents.is_floating_point():
            raise ValueError(
                f"documents must be integer ids of shape ({length},) or ({batch}, {length}), one for each "
                f"key; got {documents.dtype} {tuple(documents.shape)}"
            )
    if key_padding is not None and (key_padding.shape != (batch, length) or key_padding.dtype != torch.bool):
        raise ValueError(
            f"key_padding must be bool of shape ({batch}, {length}), True on padding; "
            f"got {key_padding.dtype} {tuple(key_padding.shape)}"
        )
    return Masks(q.shape[2], length, q.device, causal, window, documents, key_padding)
