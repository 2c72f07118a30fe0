"""A few queries against many keys: decoding. The bias is a row or two, so it is formed as it stands.

Keys that cannot matter are not even read: when an upper bound of |k| is known (a cache keeps one), the row
of the bias alone tells from where on a logit can reach the row's own diagonal one, less tau.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bias import Bias
from .masks import Masks
from .pruning import OFF, Prune, as_number, note, threshold
from .surroundings import decided, readable

FEW = 16  # queries: beyond this a tile kernel is faster, and a row would no longer be small
WORTH = 2048  # keys: below this reading them all is cheaper than asking which to skip


def why_not_rows(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if q.shape[2] > FEW:
        return f"it forms the bias as rows, which is for at most {FEW} queries"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *_tensors(bias))):
        return "it is for decoding: gradients through dense rows would take torch's slow path"
    return None


def _tensors(bias: Bias) -> list[Tensor]:
    return [*bias.views().values(), *bias.traces().values()]


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    masks: Masks,
    scale: float,
    prune: Prune = "auto",
) -> Tensor:
    if q.numel() == 0 or k.shape[2] == 0:
        return v.new_zeros(*q.shape[:3], v.shape[-1])
    rows, blind = form_rows(q, k, bias, masks)
    if rows is None:
        return _sdpa(q, k, v, None, scale)
    first = _first_keys(q, k, rows, scale, prune, masks.key_bound)
    note(_work(first, k))
    out = attend_formed_rows(q, k, v, rows, scale, first)
    return out if blind is None else out.masked_fill(blind, 0.0)


def form_rows(q: Tensor, k: Tensor, bias: Bias, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
    """(B|1, H|1, Tq, Tk): the bias, -inf where hidden; and (B|1, 1, Tq, 1): which rows see no key.

    None for one query that sees every key alike, and where no row can be blind. The bias is never rounded
    to half precision: about -50 the numbers of bfloat16 are 0.25 apart.
    """
    every = slice(0, q.shape[2]), slice(0, k.shape[2])
    tile = bias.tile(*every)
    if tile is not None:
        tile = tile.to(torch.promote_types(q.dtype, torch.float32))
    if masks.plain and (q.shape[2] == 1 or not masks.causal):
        return tile, None
    visible = masks.tile(*every)
    shown = q.new_zeros(()) if tile is None else tile
    return torch.where(visible, shown, float("-inf")), ~visible.any(-1, keepdim=True)


def attend_formed_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, first: list[int] | None = None
) -> Tensor:
    """Attention with these rows added to the logits, in the dtype of the rows if that is wider than q's.

    Then a key head at a time: all keys in float32 would be three times the memory there is, and slower.
    """
    if first is None and rows.dtype == q.dtype:
        return _sdpa(q, k, v, rows, scale)
    return _by_key_head(q, k, v, rows, scale, [0] * k.shape[1] if first is None else first)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, scale: float) -> Tensor:
    width = v.shape[-1]
    if q.shape[-1] != width:  # the flash kernels want one width
        size = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
    mask = None if rows is None else rows.expand(q.shape[0], q.shape[1], *rows.shape[2:])
    shared = decided(q.shape[1] != k.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
    return out[..., :width]


def _first_keys(
    q: Tensor, k: Tensor, rows: Tensor, scale: float, prune: Prune, key_bound: Tensor | None
) -> list[int] | None:
    """For each key head the first key that any of its rows may need; None when all are to be read.

    A row holds at least the logit of its newest visible key, exactly; no other exceeds |q| max|k| plus bias.
    """
    choice, group = as_number(prune), q.shape[1] // k.shape[1]
    if key_bound is None or choice == OFF or k.shape[2] < WORTH or not readable(q):
        return None
    q = q.to(torch.promote_types(q.dtype, torch.float32))  # a norm rounded down would be no bound
    tau = threshold(choice, k.shape[2], k.dtype, 0.0)
    bound = q.norm(dim=-1).unflatten(1, (-1, group)) * key_bound[:, :, None, None] * abs(scale)
    held = _newest_logits(q, k, rows, scale).unflatten(1, (-1, group))
    need = (held - bound - tau).flatten(1, 2)  # (B, H, Tq)
    matters = ~(rows < need.unsqueeze(-1))  # a NaN matters
    matters = matters.expand(q.shape[0], q.shape[1], *matters.shape[2:])
    by_key = matters.unflatten(1, (-1, group)).any(3).any(2).any(0)  # (Hkv, Tk)
    return by_key.to(torch.uint8).argmax(-1).tolist()


def _newest_logits(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """(B, H, Tq): the logit of each row's own key; -inf (so that nothing is skipped) where it is hidden."""
    count = q.shape[2]
    own = k[:, :, -count:].repeat_interleave(q.shape[1] // k.shape[1], 1)
    bias = rows[..., -count:].diagonal(dim1=-2, dim2=-1)
    return (q * own).sum(-1) * scale + bias


def _by_key_head(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, first: list[int]) -> Tensor:
    group = q.shape[1] // k.shape[1]
    rows = rows.expand(q.shape[0], q.shape[1], *rows.shape[2:])
    parts = []
    for head, start in enumerate(first):
        mine, key = slice(head * group, (head + 1) * group), slice(head, head + 1)
        queries, keys, values = (x.to(rows.dtype) for x in (q[:, mine], k[:, key, start:], v[:, key, start:]))
        parts.append(_sdpa(queries, keys, values, rows[:, mine, :, start:], scale))
    return torch.cat(parts, 1).to(v.dtype)


def _work(first: list[int] | None, k: Tensor) -> Tensor:
    """Keys read and keys there are, for the report of pruning."""
    total = k.shape[1] * k.shape[2]
    return torch.tensor([[total - sum(first or []), total]])
