"""Attention to a single key: its weight is one, whatever the logit, and no logit has a gradient.

The tile kernels get the one back from a logsumexp, and the zero as a difference: both round.
"""

from __future__ import annotations

from torch import Tensor

from ..bias import Bias
from .masks import Masks


def attend_one_key(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    """v, for every query that sees it; NaN where the logit is not finite, as in torch's softmax."""
    every = slice(0, q.shape[2]), slice(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits, extra = scale * (q @ k.mT), bias.tile(*every)
    weights = (logits if extra is None else logits + extra).softmax(-1)
    return weights.masked_fill(~masks.tile(*every), 0.0).to(v.dtype) @ v
