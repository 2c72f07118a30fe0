"""`attend_triton`: fused kernels for slopes and paths on NVIDIA GPUs (or, slowly, Triton's interpreter).

Triton is imported when it is needed, never before: the package works without it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from ...bias import Bias
from ..masks import Masks
from ..one_key import attend_one_key
from .inputs import Parts, document_ids, expand_path, first_of_document, stack_slope, take_apart

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD = 256
_MOST_HEADS = 65535


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    """The reason the Triton kernels cannot do this call, or None when they can."""
    parts = take_apart(bias)
    if isinstance(parts, str):
        return parts
    if masks.sinks:
        return "the kernels know no sinks"
    return _why_not_here(q) or _why_not_shapes(q, v, masks) or _why_not_path(q, parts, masks)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


def _why_not_here(q: Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f"it needs compute capability 8.0 or later, this device has {major}.{minor}"
    elif not _interpreted():
        return f"it needs CUDA tensors, got {q.device.type} (TRITON_INTERPRET=1 interprets it on the CPU)"
    elif q.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; use float16 or float32 there"
    return None


def _why_not_shapes(q: Tensor, v: Tensor, masks: Masks) -> str | None:
    if q.dtype not in _DTYPES:
        return f"it computes in float16, bfloat16 and float32, got {q.dtype}"
    width = max(q.shape[-1], v.shape[-1])
    if width > _LARGEST_HEAD:
        return f"it has tiles for heads of at most {_LARGEST_HEAD} features, got {width}"
    if q.shape[0] * q.shape[1] > _MOST_HEADS:
        return f"a grid has room for {_MOST_HEADS} heads over the batch, got {q.shape[0] * q.shape[1]}"
    if masks.sinks and masks.window is not None:
        return "it has no attention sinks: a window hides every key outside it"
    if masks.documents is not None and masks.shift < 0:
        return "documents name keys, so it needs at least as many keys as queries"
    return None


def _why_not_path(q: Tensor, parts: Parts, masks: Masks) -> str | None:
    if parts.path is None:
        return None
    if not masks.causal:
        return "a PathBias sums over the tokens between key and query: its scan is causal"
    heads, features = parts.path.probe_q.shape[1], parts.path.probe_q.shape[-1]
    if features > _LARGEST_HEAD:
        return f"it has tiles for probes of at most {_LARGEST_HEAD} features, got {features}"
    if q.shape[1] % heads:
        return f"probe heads must divide query heads, got {heads} and {q.shape[1]}"
    return None


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _operator_inputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: str | float | None
) -> tuple[Any, ...]:
    """The flat arguments of the custom operator."""
    from .prune import threshold

    parts = take_apart(bias)
    assert isinstance(parts, Parts)
    batch, heads, rows, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    slope = None if parts.slope is None else stack_slope(parts.slope, batch, heads, rows, keys)
    path = None if parts.path is None else expand_path(parts.path, batch, heads)
    return (
        _dense_last(q),
        _dense_last(k),
        _dense_last(v),
        None if slope is None else slope.rate_q,
        None if slope is None else slope.rate_k,
        None if slope is None else slope.c_q,
        None if slope is None else slope.c_k,
        None if path is None else path.probe_q.contiguous(),
        None if path is None else path.probe_k.contiguous(),
        None if path is None else path.rate.contiguous(),
        document_ids(masks, batch),
        None if masks.key_padding is None else masks.key_padding.to(torch.uint8).contiguous(),
        masks.causal,
        masks.window or 0,
        scale,
        threshold(prune, q.dtype, keys),
        path is not None and path.bounded,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> None:
    reason = why_not_triton(q, k, v, bias, masks)
    if reason is not None:
        raise ValueError(f"impl='triton' cannot do this: {reason}")


def attend_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    masks: Masks,
    scale: float,
    prune: str | float | None = "auto",
) -> Tensor:
    """softmax(scale q k^T + bias) v, tile by tile; differentiable in q, k, v and the bias's tensors.

    `prune` is None (compute everything), "auto" (leave out what rounding would lose) or a threshold in
    nats. Raises ValueError with the reason when the kernels cannot do it.
    """
    _check(q, k, v, bias, masks)
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):
        return q.new_zeros((*q.shape[:3], v.shape[-1])) + 0 * (q.sum() + k.sum() + v.sum())
    if k.shape[2] == 1:
        return attend_one_key(q, k, v, bias, masks, scale)
    from .ops import triton_forward

    out: Tensor = triton_forward(*_operator_inputs(q, k, v, bias, masks, scale, prune))[0]
    return out


@torch.no_grad()
def pruned_fraction(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    masks: Masks,
    scale: float,
    prune: str | float | None = "auto",
) -> float:
    """The share of the pairs the masks' order leaves that pruning never computes (runs the forward).

    Counted from the first key of each row; what the window or another document hides counts as hidden.
    """
    _check(q, k, v, bias, masks)
    from .ops import triton_forward

    if not masks.causal:
        return 0.0
    reached = triton_forward(*_operator_inputs(q, k, v, bias, masks, scale, prune))[2]
    token = torch.arange(masks.shift, masks.key_length, device=q.device)
    hidden = torch.zeros_like(token) if masks.window is None else (token - masks.window + 1).clamp(min=0)
    if masks.documents is not None:
        own = first_of_document(masks.documents)[:, None, masks.shift :]
        hidden = torch.maximum(hidden, own)
    if not reached.numel():
        return 0.0
    seen = (token + 1 - hidden).expand_as(reached)
    computed = token + 1 - torch.maximum(reached, hidden)
    return 1.0 - computed.sum().item() / seen.sum().item()
