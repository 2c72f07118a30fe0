"""Attention written to be read: the dense T x T computation every fast path is tested against.

Never imported by another implementation. Letters: B, H query heads, K key heads, T, D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bias import Bias
from .masks import Masks


def attend_reference(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    """softmax(scale q k^T + b) v over the visible keys; a row that sees no key gives zeros."""
    rows, cols = slice(0, q.shape[2]), slice(0, k.shape[2])
    group = q.shape[1] // k.shape[1]
    working = torch.promote_types(q.dtype, torch.float32)
    keys, values = (t.to(working).repeat_interleave(group, dim=1) for t in (k, v))

    logits = scale * (q.to(working) @ keys.transpose(-1, -2))
    extra = bias.tile(rows, cols)
    if extra is not None:
        logits = logits + extra.to(working)
    hidden = ~masks.tile(rows, cols)
    logits = logits.masked_fill(hidden, float("-inf"))

    blind = hidden.all(-1, keepdim=True)
    weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (weights @ values).to(v.dtype)
