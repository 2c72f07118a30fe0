"""Dense attention with all kinds of biases and masks, without code of `attend`.

Letters: B batch, H query heads, T tokens (t queries, j keys, l tokens of a path), D features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias, TileBias
from ...encodings.path import PaTHBias


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, visible: Tensor, scale: float, working: torch.dtype
) -> Tensor:
    """softmax(scale q k^T + b) v over visible keys, computed in `working`, in v's dtype; zero without visible keys."""
    return dense_attention_lse(q, k, v, bias, visible, scale, working)[0]


def dense_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, visible: Tensor, scale: float, working: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`dense_attention`, and the logsumexp of each row, -inf without visible keys."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(working).repeat_interleave(group, 1) for x in (k, v))
    logits = scale * torch.einsum("bhtd,bhjd->bhtj", q.to(working), keys)
    extra = dense_bias(bias, scale, working)
    if extra is not None:
        logits = logits + extra.to(working)
    if logits.numel() == 0:
        y = torch.einsum("bhtj,bhjd->bhtd", logits, values).to(v.dtype)
        return y, logits.new_full(q.shape[:3], -torch.inf)
    visible = visible & (logits != -torch.inf)  # a table may end in -inf
    seen = visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    y = torch.einsum("bhtj,bhjd->bhtd", logits.softmax(-1) * seen, values).to(v.dtype)
    return y, logits.logsumexp(-1).masked_fill(~seen[..., 0], -torch.inf)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, visible: Tensor, scale: float, working: torch.dtype
) -> Tensor:
    """Torch's fused attention in q's dtype, if there is no bias and all rows have visible keys; else dense."""
    if not isinstance(bias, NoBias) or not bool(visible.any(-1).all()) or q.numel() == 0:
        return dense_attention(q, k, v, bias, visible, scale, working)
    mask = None if bool(visible.all()) else visible
    width, wide = v.shape[-1], max(q.shape[-1], v.shape[-1])  # the fused kernel needs equal widths
    q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return y[..., :width]


def dense_bias(bias: Bias, scale: float, working: torch.dtype) -> Tensor | None:
    """b(t, j) for all pairs, by the formula of each kind of bias."""
    match bias:
        case NoBias():
            return None
        case SlopeTerm():
            return _slope(bias, working)
        case SlopeBias():
            return sum(_slope(term, working) for term in bias.terms)  # type: ignore[return-value]
        case PathBias():
            return _path(bias, working)
        case DistanceBias():
            return _distance(bias, working)
        case PaTHBias():
            return scale * path_product(bias.query["q"], *(bias.key[name] for name in ("k", "w", "beta")))
        case TileBias():
            rows, cols = (slice(0, n or 0) for n in (bias.query_length, bias.key_length))
            tile = bias.function(rows, cols, bias.query, bias.key)
            return tile if bias.scale is None else scale * tile
        case SumBias():
            parts = [part for part in (dense_bias(b, scale, working) for b in bias.parts) if part is not None]
            return sum(part.to(working) for part in parts)  # type: ignore[return-value]
    raise TypeError(f"no dense formula for {type(bias).__name__}")


def _slope(term: SlopeTerm, working: torch.dtype) -> Tensor:
    offset = term.c_k.double()[:, :, None, :] - term.c_q.double()[:, :, :, None]
    total: Any = 0.0
    if term.rate_q is not None:
        total = total + term.rate_q.to(working)[:, :, :, None] * offset.to(working)
    if term.rate_k is not None:
        total = total + term.rate_k.to(working)[:, :, None, :] * offset.to(working)
    return total  # type: ignore[no-any-return]


def _path(bias: PathBias, working: torch.dtype) -> Tensor:
    heads = bias.rate.shape[1] // bias.probe_q.shape[1]
    probe_q, probe_k = (p.to(working).repeat_interleave(heads, 1) for p in (bias.probe_q, bias.probe_k))
    z = torch.einsum("bhtp,bhlp->bhtl", probe_q, probe_k) / probe_k.shape[-1]
    edge = F.logsigmoid(z) if bias.link == "logsigmoid" else torch.sigmoid(z) - 1
    queries, keys = z.shape[-2:]
    t = torch.arange(queries)[:, None, None] + keys - queries
    j, token = torch.arange(keys)[:, None], torch.arange(keys)
    between = ((token > j) & (token <= t)).to(working)  # (t, j, l)
    return bias.rate.to(working)[..., None] * torch.einsum("bhtl,tjl->bhtj", edge, between)


def _distance(bias: DistanceBias, working: torch.dtype) -> Tensor:
    """The entries of the table, (H|1, R, L), at distances (B|1, t, j); entries may be -inf."""
    distance = (bias.position_q[:, 0, :, None] - bias.position_k[:, 0, None, :]).long()
    numbers = bias.table[0, :, 0].to(working)
    if bias.profile is not None:
        values = bias.profile(distance, numbers)
        inside = torch.ones_like(distance, dtype=torch.bool)
    else:
        entry = distance - bias.first
        inside = (entry >= 0) & (entry < numbers.shape[-1])
        values = numbers[..., entry.clamp(0, numbers.shape[-1] - 1)]
    if bias.weight is not None:
        values = bias.weight.to(working).permute(1, 3, 0, 2)[..., None] * values
    total = values.sum(1).transpose(0, 1)
    if bias.beyond == "last" or bias.profile is not None:
        return total
    return total.where(inside[:, None], 0.0 if bias.beyond == "zero" else -torch.inf)


def path_product(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """k_j^T H_{j+1} … H_t q_t, and k_j^T q_t for j > t, from one triangular system of all tokens."""
    group, tokens = q.shape[1] // k.shape[1], k.shape[2]
    k, w, beta = (x.repeat_interleave(group, 1) for x in (k, w, beta.unsqueeze(-1)))
    s = torch.arange(tokens)
    t = s[-1:] + 1 - q.shape[2] + torch.arange(q.shape[2])
    system = torch.eye(tokens, dtype=q.dtype) + beta * (w @ w.mT).triu(1)
    right = (beta * (w @ q.mT)).masked_fill(s[:, None] > t, 0.0)
    steps = torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)
    lost = (w @ k.mT).masked_fill(s[:, None] <= s, 0.0)
    return q @ k.mT - steps.mT @ lost


def visible_keys(queries: int, keys: int, masks: dict[str, Any]) -> Tensor:
    """(B|1, 1, t, j), True where the key is visible, from the arguments of `attend`."""
    t = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None, :]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if masks.get("causal", True):
        seen = seen & (j <= t)
    if masks.get("window") is not None:
        seen = seen & (((t - j).abs() < masks["window"]) | (j < masks.get("sinks", 0)))
    documents = masks.get("documents")
    if masks.get("cu_seqlens") is not None:
        documents = sum((j[0] >= end).long() for end in masks["cu_seqlens"].tolist())
    if documents is not None:
        ids = documents if documents.dim() == 2 else documents[None]
        seen = seen & (ids[:, None, keys - queries :, None] == ids[:, None, None, :])
    if masks.get("key_padding") is not None:
        seen = seen & ~masks["key_padding"][:, None, None, :]
    return seen
