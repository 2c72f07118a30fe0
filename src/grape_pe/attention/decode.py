"""A few queries against many keys, without gradients: decoding. The bias is formed as dense rows.

Keys that cannot matter are not even read: when an upper bound of |k| is known (a cache keeps one), the row
of the bias alone tells from where on a logit can reach the row's own diagonal one, less tau.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bias import Bias
from ..precision import readable, working_dtype
from .masks import Masks, finite_tokens
from .pruning import AUTO, OFF, Prune, as_number, count, nats
from .sdpa import sdpa

FEW = 16  # queries: beyond this a tile kernel is faster, and a row would no longer be small
WORTH = 2048  # keys: below this reading them all is cheaper than asking which to skip
CHUNK = 64  # keys that are read or skipped together
WASTE = 1024  # keys that may be read in vain to save a call: a call costs about as much
SPLIT = 1024  # keys of a head from which on several threads share them


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
    if not looks and visible is not None:  # values may not be looked at, and what is hidden must not spread
        out = _attend_not_finite(q, k, v, rows, visible, scale)
    else:
        parts = None
        if rows is not None and looks and masks.key_bound is not None:
            first = _first_keys(q, k, rows, scale, prune, masks.key_bound)
            waste = WASTE if rows.dtype == q.dtype else -1  # half precision is widened a head at a time
            parts = None if first is None else _joined(first, q.shape[0], waste)
        total = k.shape[1] * k.shape[2]
        count(total if parts is None else total - sum(part[1] * part[2] for part in parts), total)
        out = _attend_rows(q, k, v, rows, scale, parts, splits=visible is None)
        # NaN, or zeros: torch's result for a row of NaNs
        if looks and not torch.linalg.vector_norm(out, float("inf"), -1).amin().item() > 0:
            out = _attend_not_finite(q, k, v, rows, visible, scale)
    return (out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)), None


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    masks = Masks(1, k.shape[2], q.device, True, None, documents, key_padding, 0, key_bound)
    return attend_decode(q, k, v, bias.at_scale(scale), masks, scale, "auto")[0]


def _rows(q: Tensor, k: Tensor, bias: Bias, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
    """(B|1, H|1, Tq, Tk): the bias, -inf where hidden (None: zero); and what is visible (None: all).

    The bias is never rounded to half precision: about -50 the numbers of bfloat16 are 0.25 apart.
    """
    every = slice(0, q.shape[2]), slice(0, k.shape[2])
    tile = bias.row(k.shape[2]) if q.shape[2] == 1 else bias.tile(*every)
    if tile is not None:
        tile = tile.to(working_dtype(q.dtype))
    if masks.plain and (q.shape[2] == 1 or not masks.causal):
        return tile, None
    visible = masks.tile(*every)
    shown = q.new_zeros(()) if tile is None else tile
    return torch.where(visible, shown, float("-inf")), visible


#: of consecutive key heads that are attended together: (first head, number of heads, first key)
Part = tuple[int, int, int]


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor | None,
    scale: float,
    parts: list[Part] | None = None,
    splits: bool = False,
) -> Tensor:
    """Attention with these rows added to the logits, in the dtype of the rows if that is wider than q's.

    Then a few key heads at a time: all keys in float32 would be three times the memory there is, and slower.
    `splits` allows to share the keys of a head among threads; for rows without hidden keys.
    """
    if rows is None:
        return sdpa(q, k, v, scale)
    if rows.shape[0] != q.shape[0] or rows.shape[1] != q.shape[1]:
        rows = rows.expand(q.shape[0], q.shape[1], -1, -1)
    if rows.dtype == q.dtype and (parts is None or parts == [(0, k.shape[1], 0)]):
        return sdpa(q, k, v, scale, attn_mask=rows)
    group, done = q.shape[1] // k.shape[1], []
    for head, number, start in parts or _equal_parts(q, k):
        pieces = _pieces(q, k, v, rows, start, scale) if splits and parts and number == 1 else 1
        start -= -(k.shape[2] - start) % pieces  # a few keys more, for pieces of one length
        length = k.shape[2] - start
        queries, row = (x.narrow(1, head * group, number * group) for x in (q, rows))
        keys, values = (x.narrow(1, head, number).narrow(2, start, length) for x in (k, v))
        queries, keys, values = (x.to(rows.dtype) for x in (queries, keys, values))
        row = row.narrow(3, start, length)
        if pieces > 1:
            done.append(_attend_split(queries, keys, values, row, scale, pieces))
        else:
            done.append(sdpa(queries, keys, values, scale, attn_mask=row))
    return torch.cat(done, 1).to(v.dtype)


def _equal_parts(q: Tensor, k: Tensor) -> list[Part]:
    """All keys, as many key heads at a time as give work to all threads."""
    heads, together = k.shape[1], 1  # torch.compile cannot trace the number of threads
    if not torch.compiler.is_compiling():
        together = max(1, torch.get_num_threads() * heads // (q.shape[0] * q.shape[1]))
    return [(head, min(together, heads - head), 0) for head in range(0, heads, together)]


def _joined(first: list[int], batch: int, waste: int = WASTE) -> list[Part]:
    """Neighbouring key heads in one call, as long as at most `waste` keys are read in vain; -1: never."""
    parts: list[Part] = [(0, 1, first[0])]
    unneeded = 0  # keys that the last part reads in vain
    for head, start in enumerate(first[1:], 1):
        begin, number, lowest = parts[-1]
        more = number * max(0, lowest - start) + max(0, start - lowest)
        if (unneeded + more) * batch <= waste:
            parts[-1], unneeded = (begin, number + 1, min(lowest, start)), unneeded + more
        else:
            parts.append((head, 1, start))
            unneeded = 0
    return parts


def _pieces(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, start: int, scale: float) -> int:
    """In how many pieces to cut the keys of a key head: torch gives a head of a sequence to one thread."""
    keys = k.shape[2] - start
    if keys < SPLIT or q.shape[-1] != v.shape[-1] or scale <= 0 or q.shape[0] > 1:
        return 1
    if any(x.stride(-1) != 1 for x in (q, k, v, rows)):  # the kernel would misread other layouts
        return 1
    pieces = max(1, torch.get_num_threads() * k.shape[1] // q.shape[1])
    return pieces if -keys % pieces <= start else 1


def _attend_split(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, pieces: int) -> Tensor:
    """One sequence, one key head: attention to each piece of the keys, then their mean by softmax weight."""
    keys, values = (x[0].unflatten(1, (pieces, -1)).transpose(0, 1) for x in (k, v))  # (pieces, 1, n, D)
    keys, values = (x.expand(-1, q.shape[1], -1, -1) for x in (keys, values))
    row = rows[0].unflatten(-1, (pieces, -1)).permute(2, 0, 1, 3)
    q = q.expand(pieces, -1, -1, -1)
    out, lse = FLASH(q, keys, values, attn_mask=row, scale=scale)
    weight = torch.add(lse.softmax(0), lse, alpha=0)  # NaN where a piece has no finite logit
    return (out * weight.unsqueeze(-1)).sum(0, keepdim=True)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _first_keys(
    q: Tensor, k: Tensor, rows: Tensor, scale: float, prune: Prune, key_bound: Tensor
) -> list[int] | None:
    """For each key head the first key to read; None for all keys.

    A row has at least the logit of its newest visible key, exactly; no other exceeds |q| max|k| plus bias.
    Keys are skipped in chunks, by the largest bias of a chunk.
    """
    choice = as_number(prune)
    if choice == OFF or k.shape[2] < WORTH:
        return None
    need = _needed(q.unflatten(1, (k.shape[1], -1)), k, rows, scale, key_bound)
    need = need - (nats(k.shape[2]) if choice == AUTO else choice)
    odd = k.shape[2] % CHUNK or CHUNK  # keys of the first chunk
    largest = rows.narrow(3, odd, k.shape[2] - odd).unflatten(-1, (-1, CHUNK)).amax(-1)  # NaN if one is
    largest = torch.cat([rows.narrow(3, 0, odd).amax(-1, keepdim=True), largest], -1)
    read = (largest < need.unsqueeze(-1)).logical_not_()  # (B, H, Tq, chunks); a NaN matters
    read = read.unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 3).any(1)  # (Hkv, chunks)
    chunks = read.view(torch.uint8).argmax(-1).tolist()
    return [odd + CHUNK * (chunk - 1) if chunk else 0 for chunk in chunks]


def _needed(q: Tensor, k: Tensor, rows: Tensor, scale: float, key_bound: Tensor) -> Tensor:
    """(B, H, Tq): the least bias with which a logit can reach that of the row's own key; -inf if that is hidden.

    q is (B, Hkv, H / Hkv, Tq, D).
    """
    q, count = q.to(working_dtype(q.dtype)), q.shape[3]  # a norm rounded down would be no bound
    own = (q * k[:, :, None, -count:]).sum(-1) * scale
    bound = torch.linalg.vector_norm(q, dim=-1) * (key_bound * abs(scale))[:, :, None, None]
    return (own - bound).flatten(1, 2) + rows[..., -count:].diagonal(dim1=-2, dim2=-1)


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
