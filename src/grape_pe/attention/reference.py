"""Attention written to be read: the dense T x T computation every fast path is tested against.

Never imported by another implementation. Letters: B, H query heads, K key heads, T, D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bias import Bias
from ..bias.base import check_tile
from .masks import Masks, finite_tokens
from .pruning import Prune


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + b) v over the visible keys; a row that sees no key gives zeros. And logsumexp."""
    rows, cols = slice(0, q.shape[2]), slice(0, k.shape[2])
    group = q.shape[1] // k.shape[1]
    working = torch.promote_types(q.dtype, torch.float32)
    q, k, v, dtype = q.to(working), k.to(working), v.to(working), v.dtype
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    # What is not finite is taken out and comes back as a NaN logit, so that no product 0 * NaN spreads it.
    sound_q, sound_k = finite_tokens(q).unsqueeze(-1), finite_tokens(k, v).unsqueeze(-1)
    q, k, v = q.where(sound_q, 0.0), k.where(sound_k, 0.0), v.where(sound_k, 0.0)
    logits = scale * (q @ k.mT)
    extra = bias.tile(rows, cols)
    if extra is not None:
        check_tile(extra, logits.shape, q.device)
        logits = logits + extra.to(working)
    hidden = ~masks.tile(rows, cols)
    logits = logits.where(sound_q & sound_k.mT, float("nan")).masked_fill(hidden, float("-inf"))

    fully_masked = (logits == float("-inf")).all(-1, keepdim=True)  # by the masks or by the bias
    logits = logits.masked_fill(fully_masked, 0.0)
    weights = logits.softmax(-1).masked_fill(fully_masked, 0.0)
    lse = logits.logsumexp(-1).masked_fill(fully_masked.squeeze(-1), float("-inf"))
    return (weights @ v).to(dtype), lse
