"""Exact pruning: which keys can a query leave out without changing the rounded result?

A key whose logit lies tau nats below another logit of the same row has less than exp(-tau) of its
weight. For slopes the bound is known before the kernel runs: over a square of PATCH x PATCH tokens a
term is a product of two intervals, and |q.k| <= |q| |k|. For a path the kernel itself watches the sums.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: tokens a side of the squares in which slope bounds are taken
PATCH = 64


def threshold(prune: str | float | None, dtype: torch.dtype, keys: int) -> float:
    """tau in nats, or -1 for no pruning.

    "auto": all the keys together weigh less than rounding (the first two terms), also in the gradient
    of a rate, where a key at distance x / rate counts x exp(-x): hence the margin of 4, about log(tau).
    """
    if prune is None:
        return -1.0
    if isinstance(prune, str):
        if prune != "auto":
            raise ValueError(f'prune must be None, "auto" or a threshold in nats, got {prune!r}')
        return -math.log(torch.finfo(dtype).eps) + math.log(max(keys, 1)) + 4.0
    if prune < 0:
        raise ValueError(f"prune must be a threshold in nats >= 0, got {prune}; use None to turn it off")
    return float(prune)


def _patches(x: Tensor, patch: int, largest: bool) -> Tensor:
    """(…, T) -> (…, ceil(T / patch)): the extreme of every patch."""
    fill = -math.inf if largest else math.inf
    padded = F.pad(x, (0, -x.shape[-1] % patch), value=fill).unflatten(-1, (-1, patch))
    return padded.amax(-1) if largest else padded.amin(-1)


def _slope_bound(
    rate_q: Tensor | None, rate_k: Tensor | None, c_q: Tensor, c_k: Tensor, patch: int
) -> Tensor:
    """Upper bound of the slopes over every pair of patches (B, H, nq, nk), whatever the signs."""
    bound: Tensor | float = 0.0
    for r in range(c_q.shape[2]):
        ends = []
        for largest in (False, True):
            rate: Tensor | float = 0.0
            if rate_q is not None:
                rate = rate + _patches(rate_q[:, :, r], patch, largest).unsqueeze(-1)
            if rate_k is not None:
                rate = rate + _patches(rate_k[:, :, r], patch, largest).unsqueeze(-2)
            theirs = _patches(c_k[:, :, r], patch, largest).unsqueeze(-2)
            ours = _patches(c_q[:, :, r], patch, not largest).unsqueeze(-1)
            ends.append((rate, (theirs - ours).float()))
        (low_rate, low), (high_rate, high) = ends
        products = [low_rate * low, low_rate * high, high_rate * low, high_rate * high]
        bound = bound + torch.stack(products).amax(0)
    assert isinstance(bound, Tensor)
    return bound


def _own_logit(
    q: Tensor,
    k: Tensor,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    c_q: Tensor,
    c_k: Tensor,
    padding: Tensor | None,
    scale: float,
) -> Tensor:
    """Each query's logit with the key at its own token (B, H, Tq); -inf where that key is hidden."""
    shift, group = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    own = k[:, :, shift:].float().repeat_interleave(group, 1)
    logit = scale * (q.float() * own).sum(-1)
    offset = (c_k[..., shift:] - c_q).float()
    if rate_q is not None:
        logit = logit + (rate_q * offset).sum(2)
    if rate_k is not None:
        logit = logit + (rate_k[..., shift:] * offset).sum(2)
    if padding is not None:
        logit = logit.masked_fill(padding[:, None, shift:].bool(), -math.inf)
    return logit


def first_key_of_slope(
    q: Tensor,
    k: Tensor,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    c_q: Tensor,
    c_k: Tensor,
    path_rate: Tensor | None,
    padding: Tensor | None,
    scale: float,
    tau: float,
    patch: int,
) -> Tensor:
    """For each query (B, H, Tq) the first key worth computing; causal, so the row's own key is seen."""
    group = q.shape[1] // k.shape[1]
    norm_q = _patches(q.float().norm(dim=-1), patch, True)
    norm_k = _patches(k.float().norm(dim=-1), patch, True).repeat_interleave(group, 1)
    best = abs(scale) * norm_q.unsqueeze(-1) * norm_k.unsqueeze(-2)
    best = best + _slope_bound(rate_q, rate_k, c_q, c_k, patch)
    if path_rate is not None:  # a path with rate >= 0 only lowers logits; otherwise nothing is known
        best = best + torch.where(path_rate >= 0, 0.0, math.inf)[..., None, None]
    attained = _patches(_own_logit(q, k, rate_q, rate_k, c_q, c_k, padding, scale), patch, False)
    # Written so that a NaN keeps its patch.
    kept = ~(best < attained.unsqueeze(-1) - tau)
    first = kept.int().argmax(-1).int() * patch
    return first.repeat_interleave(patch, -1)[..., : q.shape[2]].contiguous()


def last_query_of_block(first: Tensor, keys: int, block: int) -> Tensor:
    """For each block of keys (B, H, nk) one more than the last query that starts at or before it."""
    blocks = -(-keys // block)
    row = torch.arange(1, first.shape[-1] + 1, device=first.device, dtype=torch.int32).expand_as(first)
    last = first.new_zeros((*first.shape[:2], blocks))
    where = (first // block).long().clamp_(max=blocks - 1)
    return last.scatter_reduce_(-1, where, row, "amax").cummax(-1).values.int().contiguous()
