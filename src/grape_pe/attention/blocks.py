"""Any bias, any mask, any device and dtype in plain torch: a block of queries at a time, never T x T.

The backward pass computes each block again through autograd (`torch.utils.checkpoint`). It is what there is
without a compiler, for a `TileBias` (a Python function, which no kernel can hold) and in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..bias import Bias
from .masks import Masks, finite_tokens
from .pruning import Prune

#: elements of one block's logits, all heads together (float32: 64 MB)
BLOCK_ELEMENTS = 1 << 24


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    working = torch.promote_types(q.dtype, torch.float32)
    group, dtype = q.shape[1] // k.shape[1], v.dtype
    q, k, v = q.to(working), *(x.to(working).repeat_interleave(group, 1) for x in (k, v))
    sound_q, sound_k = finite_tokens(q).unsqueeze(-1), finite_tokens(k, v).unsqueeze(-1)
    q, k, v = q.where(sound_q, 0.0), k.where(sound_k, 0.0), v.where(sound_k, 0.0)

    def block(rows: slice) -> tuple[Tensor, Tensor]:
        cols = masks.columns(rows)
        logits = scale * (q[:, :, rows] @ k[:, :, cols].mT)
        extra = bias.tile(rows, cols)
        if extra is not None:
            logits = logits + extra.to(working)
        hidden = ~masks.tile(rows, cols)
        blind = hidden.all(-1, keepdim=True)
        logits = logits.where(sound_q[:, :, rows] & sound_k[:, :, cols].mT, float("nan"))
        logits = logits.masked_fill(hidden, float("-inf")).masked_fill(blind, 0.0)
        weights = logits.softmax(-1).masked_fill(blind, 0.0)
        lse = logits.logsumexp(-1).masked_fill(blind.squeeze(-1), float("-inf"))
        return weights @ v[:, :, cols], lse.float()

    size = max(1, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    blocks = [slice(t, min(t + size, q.shape[2])) for t in range(0, q.shape[2], size)]
    if not blocks or k.shape[2] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0.0 * (q.sum() + k.sum() + v.sum())
        return out.to(dtype), q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    if torch.is_grad_enabled():
        parts = [checkpoint(block, rows, use_reentrant=False) for rows in blocks]
    else:
        parts = [block(rows) for rows in blocks]
    outputs, logsums = zip(*parts, strict=True)
    return torch.cat(outputs, 2).to(dtype), torch.cat(logsums, 2)
