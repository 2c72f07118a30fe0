"""Any bias, any mask, any device and dtype in plain torch: a block of queries at a time, never T x T.

The backward pass computes each block again through autograd (`torch.utils.checkpoint`). It is what there is
without a compiler, for a `TileBias` (a Python function, which no kernel can hold) and in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..bias import Bias
from ..bias.base import check_tile
from ..precision import readable
from .masks import Masks, finite_tokens
from .pruning import Prune

#: elements of one block's logits, all heads together (float32: 64 MB)
BLOCK_ELEMENTS = 1 << 24
#: queries of one block: keys after the last one are not computed
BLOCK_ROWS = 128


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    working = torch.promote_types(q.dtype, torch.float32)
    group, dtype = q.shape[1] // k.shape[1], v.dtype
    q, k, v = q.to(working), *(x.to(working).repeat_interleave(group, 1) for x in (k, v))
    finite = _finite(q, k, v)
    if not finite:
        sound_q, sound_k = finite_tokens(q).unsqueeze(-1), finite_tokens(k, v).unsqueeze(-1)
        q, k, v = q.where(sound_q, 0.0), k.where(sound_k, 0.0), v.where(sound_k, 0.0)
    whole = bias.logits()

    def block(rows: slice) -> tuple[Tensor, Tensor]:
        cols = masks.columns(rows)
        if whole is not None:
            logits = whole(rows, cols).to(working)
        else:
            logits = scale * (q[:, :, rows] @ k[:, :, cols].mT)
            extra = bias.tile(rows, cols)
            if extra is not None:
                check_tile(extra, logits.shape, q.device)
                logits = logits + extra.to(working)
        if not finite:
            logits = logits.where(sound_q[:, :, rows] & sound_k[:, :, cols].mT, float("nan"))
        weights, lse = _softmax(logits, masks, rows, cols)
        return weights @ v[:, :, cols], lse

    size = min(BLOCK_ROWS, max(1, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2])))
    blocks = [slice(t, min(t + size, q.shape[2])) for t in range(0, q.shape[2], size)]
    if not blocks or k.shape[2] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0.0 * (q.sum() + k.sum() + v.sum())
        return out.to(dtype), q.new_full(q.shape[:3], float("-inf"))
    if torch.is_grad_enabled():
        parts = [checkpoint(block, rows, use_reentrant=False) for rows in blocks]
    else:
        parts = [block(rows) for rows in blocks]
    outputs, logsums = zip(*parts, strict=True)
    return torch.cat(outputs, 2).to(dtype), torch.cat(logsums, 2)


def _softmax(logits: Tensor, masks: Masks, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
    """Weights over the visible keys and the logsumexp; zeros and -inf for a query that sees none."""
    hidden, finite = ~masks.tile(rows, cols), _finite(logits)
    if finite:  # takes a sixth of the time of masked_fill, and none in the backward pass
        logits = logits + logits.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    else:
        logits = logits.masked_fill(hidden, float("-inf"))
    if masks.plain and finite:  # every query sees a key
        weights = logits.softmax(-1)
        if not logits.requires_grad:
            return weights, logits.amax(-1) - weights.amax(-1).log()
        top, key = logits.max(-1, keepdim=True)  # of one key: weights may tie where logits do not
        return weights, (top - weights.gather(-1, key).log()).squeeze(-1)
    fully_masked = (logits == float("-inf")).all(-1, keepdim=True)  # by the masks or by the bias
    logits = logits.masked_fill(fully_masked, 0.0)
    weights = logits.softmax(-1).masked_fill(fully_masked, 0.0)
    return weights, logits.logsumexp(-1).masked_fill(fully_masked.squeeze(-1), float("-inf"))


def _finite(*tensors: Tensor) -> bool:
    """Whether all are finite, as far as that is known: elsewhere than on the CPU it would be a synchronisation."""
    if any(x.device.type != "cpu" or not readable(x) for x in tensors):
        return False
    return math.isfinite(sum(x.detach().sum().item() for x in tensors))
