"""torch's own attention, where there is no bias and no mask but causal order."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..bias import Bias, NoBias
from ..precision import readable
from .masks import Masks, finite_tokens
from .pruning import Prune


def why_not_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if not isinstance(bias, NoBias):
        return f"torch's attention takes a {type(bias).__name__} only as a dense T x T mask"
    if not masks.plain:
        return "torch's attention takes window, documents and padding only as a dense T x T mask"
    if masks.causal and masks.shift and masks.query_length > 1:
        return (
            "torch's causal attention aligns the first query with the first key, not the last with the last"
        )
    return None


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, None]:
    if 0 in (*q.shape, k.shape[2], v.shape[-1]):
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0.0 * (q.sum() + k.sum() + v.sum()), None
    causal = bool(masks.causal)
    if masks.query_length == 1:  # a branch, because torch.compile may hold a symbol here
        causal = False
    if q.device.type == "cpu" and readable(q) and not bool((q.sum() + k.sum() + v.sum()).isfinite()):
        return _attend_not_finite(q, k, v, causal, scale), None
    return sdpa(q, k, v, scale, is_causal=causal), None


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` for any value width, scale and number of key heads."""
    width, features = v.shape[-1], q.shape[-1]
    if scale <= 0:  # torch multiplies the -inf of its mask by it
        q, scale = (-q, -scale) if scale < 0 else (0.0 * q, 1.0)
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    if features == width:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    size = max(features, width)  # the flash kernels want one width
    q, k, v = (F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)[..., :width]


def _attend_not_finite(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """torch gives zeros for a query of NaNs, and lets a NaN in a later value reach earlier rows."""
    bad_q, bad_k = ~finite_tokens(q).unsqueeze(-1), ~finite_tokens(k, v).unsqueeze(-1)
    q, k, v = q.masked_fill(bad_q, 0.0), k.masked_fill(bad_k, 0.0), v.masked_fill(bad_k, 0.0)
    seen = bad_k.cummax(2).values if causal else bad_k.any(2, keepdim=True)
    spoiled = bad_q | seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return sdpa(q, k, v, scale, is_causal=causal).masked_fill(spoiled, float("nan"))
