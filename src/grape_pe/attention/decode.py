"""A few queries against many keys, without gradients: decoding. The bias is formed as dense rows.

The compiled CPU kernel skips keys that cannot matter: with an upper bound of |k| (a cache keeps one), the row of the
bias gives the first key whose logit can come within tau of the query's own. Elsewhere torch's attention takes the rows
as its mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bias import Bias
from ..bias.base import check_tile
from ..precision import readable, working_dtype
from .cpu import decode as compiled
from .masks import Masks, checked_scale, finite_tokens
from .pruning import AUTO, Prune, as_number, count, nats
from .sdpa import sdpa

FEW = 16  # queries: beyond this a tile kernel is faster, and a row would no longer be small
WORTH = 2048  # keys: below this reading them all is cheaper than asking which to skip


def why_not_decode(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if q.shape[2] > FEW:
        return f"it forms the bias as rows, which is for at most {FEW} queries"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *bias.tensors().values())):
        return "it is for decoding: gradients through dense rows would take torch's slow path"
    return None


def attend_decode(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, None]:
    if 0 in (*q.shape, k.shape[2], v.shape[-1]):
        return v.new_zeros(*q.shape[:3], v.shape[-1]), None
    rows, visible = _rows(q, k, bias, masks)
    looks = q.device.type == "cpu" and readable(q)
    sound = looks or visible is None  # else values may not be looked at, and what is hidden must not spread
    if looks and compiled.why_not(q) is None:
        bound = masks.key_bound if k.shape[2] >= WORTH else None
        out, sound, read = compiled.attend_rows(q, k, v, rows, scale, _tau(prune, k.shape[2]), bound)
        out = out.to(v.dtype)
        count(read, q.shape[0] * k.shape[1] * k.shape[2])
    elif sound:
        out = _attend_rows(q, k, v, rows, scale)
        # NaN, or zeros: torch's result for a row of NaNs
        sound = not looks or torch.linalg.vector_norm(out, float("inf"), -1).amin().item() > 0
    if sound:
        return out, None
    out = _attend_not_finite(q, k, v, rows, visible, scale)
    return (out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)), None


def _tau(prune: Prune, keys: int) -> float:
    choice = as_number(prune)
    return nats(keys) if choice == AUTO else choice


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    scale: float | None = None,
    documents: Tensor | None = None,
    key_padding: Tensor | None = None,
    key_bound: Tensor | None = None,
) -> Tensor:
    """`attend` for one query on the CPU, without gradients and without its checks: what a cache calls.

    `documents` is (B|1, Tk); the rest is as for `attend`.
    """
    scale = checked_scale(scale, q.shape[-1])
    masks = Masks(1, k.shape[2], q.device, True, None, documents, key_padding, 0, key_bound)
    return attend_decode(q, k, v, bias.at_scale(scale), masks, scale, "auto")[0]


def _rows(q: Tensor, k: Tensor, bias: Bias, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
    """(B|1, H|1, Tq, Tk): the bias, -inf where hidden (None: zero); and what is visible (None: all).

    The bias is never rounded to half precision: about -50 the numbers of bfloat16 are 0.25 apart.
    """
    every = slice(0, q.shape[2]), slice(0, k.shape[2])
    tile = bias.row(k.shape[2]) if q.shape[2] == 1 else bias.tile(*every)
    if tile is not None:
        check_tile(tile, (*q.shape[:3], k.shape[2]), q.device)
        tile = tile.to(working_dtype(q.dtype))
    if masks.plain and (q.shape[2] == 1 or not masks.causal):
        return tile, None
    visible = masks.tile(*every)
    shown = q.new_zeros(()) if tile is None else tile
    return torch.where(visible, shown, float("-inf")), visible


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, scale: float) -> Tensor:
    """Attention by torch with these rows added to the logits, in the dtype of the rows if that is wider than q's.

    Then a few key heads at a time: all keys in float32 would be three times the memory there is, and slower.
    """
    if rows is None:
        return sdpa(q, k, v, scale)
    if rows.shape[0] != q.shape[0] or rows.shape[1] != q.shape[1]:
        rows = rows.expand(q.shape[0], q.shape[1], -1, -1)
    if rows.dtype == q.dtype:
        return sdpa(q, k, v, scale, attn_mask=rows)
    group, step, done = q.shape[1] // k.shape[1], _heads_at_once(q, k), []
    for head in range(0, k.shape[1], step):
        queries, row = (x[:, head * group : (head + step) * group] for x in (q, rows))
        queries, keys, values = (
            x.to(rows.dtype) for x in (queries, *(x[:, head : head + step] for x in (k, v)))
        )
        done.append(sdpa(queries, keys, values, scale, attn_mask=row))
    return torch.cat(done, 1).to(v.dtype)


def _heads_at_once(q: Tensor, k: Tensor) -> int:
    """As many key heads as give work to all threads."""
    if torch.compiler.is_compiling():  # which cannot trace the number of threads
        return 1
    return max(1, torch.get_num_threads() * k.shape[1] // (q.shape[0] * q.shape[1]))


def _attend_not_finite(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, visible: Tensor | None, scale: float
) -> Tensor:
    """The same when something is not finite: torch's products 0 * NaN would spread what is hidden."""
    bad_q, bad_k = ~finite_tokens(q).unsqueeze(-1), ~finite_tokens(k, v)
    seen = bad_k.unsqueeze(2) if visible is None else visible & bad_k.unsqueeze(2)  # (B, Hkv, Tq|1, Tk)
    spoiled = bad_q | seen.any(-1, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], 1)
    if rows is not None:
        spoiled = spoiled | rows.isnan().any(-1, keepdim=True)
    q, k, v = q.masked_fill(bad_q, 0.0), *(x.masked_fill(bad_k.unsqueeze(-1), 0.0) for x in (k, v))
    return _attend_rows(q, k, v, rows, scale).masked_fill(spoiled, float("nan"))
