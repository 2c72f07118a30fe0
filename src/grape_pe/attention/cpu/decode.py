"""A few queries over many keys by the compiled CPU kernel, decode.cpp."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from . import build

#: `Decode` in decode.cpp: sizes, strides, scale and tau, addresses
PROBLEM = struct.Struct("8q 12q 2f 7P")
#: the kernel's codes of the dtypes of q, k and v
BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: -2}


def why_not(q: Tensor) -> str | None:
    """Why the kernel cannot take these queries, or None."""
    if q.device.type != "cpu" or q.dtype not in BYTES:
        return f"it reads float32, float16 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    return build.why_not()


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, scale: float, tau: float, key_bound: Tensor | None
) -> tuple[Tensor, bool, int]:
    """Attention with these rows added to the logits: (output in float32, whether it is sound, keys read).

    `rows` broadcasts to (B, H, Tq, Tk), -inf where a key is hidden. It is sound if every number is finite and
    every query sees a key. With a `key_bound` keys further than `tau` below a row's own are not read.
    """
    q, k, v = map(_adjacent, (q, k, v))
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    build.check_array("k", k, q.dtype, (batch, kv_heads, keys, width))
    build.check_array("v", v, q.dtype, (batch, kv_heads, keys, v.shape[-1]))
    row_strides: tuple[int, ...] = (0, 0, 0)
    row_address = bound_address = 0
    if rows is not None:
        rows = _adjacent(rows.to(torch.float32).expand(batch, heads, queries, keys))
        build.check_array("rows", rows, torch.float32, (batch, heads, queries, keys))
        row_strides, row_address = rows.stride()[:3], rows.data_ptr()
    if rows is None or key_bound is None:
        tau = -1.0
    else:
        key_bound = key_bound.to(torch.float32).contiguous()
        build.check_array("key_bound", key_bound, torch.float32, (batch, kv_heads))
        bound_address = key_bound.data_ptr()
    out = q.new_empty((batch, heads, queries, v.shape[-1]), dtype=torch.float32)
    read = torch.empty(batch * kv_heads, dtype=torch.int64, device=q.device)
    sizes = batch, heads, kv_heads, queries, keys, width, v.shape[-1], torch.get_num_threads()
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *row_strides
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), row_address, bound_address
    numbers = ctypes.c_float(scale).value, tau  # infinite beyond float32, for which `pack` raises
    problem = PROBLEM.pack(*sizes, *strides, *numbers, *addresses, out.data_ptr(), read.data_ptr())
    return out, bool(build.run("grape_decode", problem, BYTES[q.dtype])), int(read.sum())


def _adjacent(x: Tensor) -> Tensor:
    """With adjacent features, and no negation left to be done on reading, which an address does not tell."""
    return (x if x.stride(-1) == 1 else x.contiguous()).resolve_neg()
