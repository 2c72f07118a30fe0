"""`grape::tiles` by the compiled kernel: lays the tensors out as tiles.cpp reads them, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import pruning
from .coordinates import as_two_floats
from .cpu import build as native
from .cpu.build import LANES, TILE
from .tile_problem import TileProblem

Arrays = dict[str, Tensor | None]
Grads = list[Tensor | None]


def native_forward(p: TileProblem) -> tuple[Tensor, Tensor, Tensor]:
    width = _padded(p.v.shape[-1])
    out = p.q.new_empty(*p.q.shape[:3], width)
    norms = p.q.new_empty(*p.q.shape[:3], 2)
    work = torch.zeros(*p.q.shape[:2], 2, dtype=torch.int64)
    if p.empty:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1]), norms.fill_(float("inf")), work
    tau = p.tau()
    arrays = {**_inputs(p), **_bounds(p, tau), "out": out, "norms": norms, "work": work}
    native.run("grape_forward", _sizes(p, 1), p.scale, tau, arrays)
    return _cut(out, p.v.shape[-1]), norms, work


def native_backward(
    p: TileProblem, d_out: Tensor, out: Tensor, norms: Tensor, work: Tensor, c_grad: bool
) -> Grads:
    if p.empty:
        inputs = (p.q, p.k, p.v, p.c_q, p.c_k, p.rate_q, p.rate_k, p.probe_q, p.probe_k, p.path_rate)
        return [None if x is None else torch.zeros_like(x) for x in inputs]
    tau, splits = p.tau(), _splits(p)
    grads = _gradients(p, splits, c_grad)
    arrays = {**_inputs(p), **_bounds(p, tau), **grads, "norms": norms.contiguous()}
    arrays["out"], arrays["d_out"] = _rows(out), _rows(d_out)
    arrays["order"] = work[..., 0].flatten().argsort(descending=True)
    sizes = {**_sizes(p, splits), "want_slope": p.bias_grad and p.c_q is not None, "want_c": c_grad}
    native.run("grape_backward", sizes, p.scale, tau, arrays)
    return _collect(p, grads)


def _padded(width: int) -> int:
    return width + -width % LANES


def _rows(x: Tensor) -> Tensor:
    """Contiguous, the last axis padded with zeros to whole vectors."""
    missing = -x.shape[-1] % LANES
    return (F.pad(x, (0, missing)) if missing else x).contiguous()


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def _splits(p: TileProblem) -> int:
    """Parts of the query blocks with gradients of their own, when there are more threads than heads."""
    heads, blocks = p.q.shape[0] * p.q.shape[1], -(-p.q.shape[2] // TILE)
    return max(1, min(blocks, -(-torch.get_num_threads() // heads)))


def _sizes(p: TileProblem, splits: int) -> dict[str, int]:
    return {
        "B": p.q.shape[0],
        "H": p.q.shape[1],
        "KV": p.k.shape[1],
        "Tq": p.q.shape[2],
        "Tk": p.k.shape[2],
        "D": _padded(p.q.shape[-1]),
        "Dv": _padded(p.v.shape[-1]),
        "R": 0 if p.c_q is None else p.c_q.shape[0],
        "P": 0 if p.probe_q is None else p.probe_q.shape[-1],
        "Pw": 0 if p.probe_q is None else _padded(p.probe_q.shape[-1]),
        "causal": p.causal,
        "window": p.window,
        "bounded": p.bounded,
        "splits": splits,
    }


def _inputs(p: TileProblem) -> Arrays:
    arrays: Arrays = {"q": _rows(p.q), "k": _rows(p.k), "v": _rows(p.v)}
    for side, c in (("cq", p.c_q), ("ck", p.c_k)):
        if c is not None:
            arrays[f"{side}_high"], arrays[f"{side}_low"] = _halves(c)
    arrays["rate_q"] = None if p.rate_q is None else p.rate_q.contiguous()
    arrays["rate_k"] = None if p.rate_k is None else p.rate_k.contiguous()
    if p.probe_q is not None and p.probe_k is not None and p.path_rate is not None:
        arrays["probe_q"], arrays["probe_k"] = _rows(p.probe_q), _rows(p.probe_k)
        arrays["path_rate"] = p.path_rate.contiguous()
    if p.documents is not None:
        arrays["documents"] = _small_ids(p.documents)
    if p.key_padding is not None:
        arrays["padding"] = p.key_padding.contiguous()
    return arrays


def _halves(c: Tensor) -> tuple[Tensor, Tensor]:
    high, low = as_two_floats(c)
    return high.contiguous(), low.contiguous()


def _small_ids(documents: Tensor) -> Tensor:
    """Ids as int32, renumbered only when they do not fit."""
    if documents.dtype == torch.int64 and bool(((documents < -(1 << 31)) | (documents >= 1 << 31)).any()):
        documents = documents.unique(return_inverse=True)[1]
    return documents.to(torch.int32).contiguous()


def _bounds(p: TileProblem, tau: float) -> Arrays:
    if tau == pruning.OFF:
        return {}
    arrays: Arrays = {
        "q_norm": p.q.norm(dim=-1) * abs(p.scale),
        "k_norm": pruning.key_bounds(p.k, p.v, TILE),
    }
    if p.c_k is not None:
        bounds = pruning.slope_bounds(p.c_k, p.rate_k, TILE)
        arrays["c_max_high"], arrays["c_max_low"] = _halves(bounds.c_max)
        arrays["c_min_high"], arrays["c_min_low"] = _halves(bounds.c_min)
        arrays["rate_min"], arrays["rate_max"] = bounds.rate_min, bounds.rate_max
    return arrays


def _gradients(p: TileProblem, splits: int, c_grad: bool) -> dict[str, Tensor]:
    batch, heads, keys = p.q.shape[0], p.q.shape[1], p.k.shape[2]
    grads = {
        "d_q": torch.empty(*p.q.shape[:3], _padded(p.q.shape[-1])),
        "d_k": torch.zeros(splits, batch, heads, keys, _padded(p.k.shape[-1])),
        "d_v": torch.zeros(splits, batch, heads, keys, _padded(p.v.shape[-1])),
    }
    if p.c_q is not None and p.c_k is not None and p.bias_grad:
        grads["d_rate_q"] = torch.zeros(p.c_q.shape, dtype=torch.float64)
        if c_grad:
            grads["d_cq"] = torch.zeros(p.c_q.shape, dtype=torch.float64)
            grads["d_ck"] = torch.zeros(splits, *p.c_k.shape, dtype=torch.float64)
        if p.rate_k is not None:
            grads["d_rate_k"] = torch.zeros(splits, *p.c_k.shape, dtype=torch.float64)
    if p.probe_q is not None:
        width = _padded(p.probe_q.shape[-1])
        grads["d_probe_q"] = torch.empty(*p.probe_q.shape[:3], width)
        grads["d_probe_k"] = torch.zeros(splits, batch, heads, keys, width)
        grads["d_path_rate"] = torch.zeros(splits, batch, heads, dtype=torch.float64)
    return grads


def _collect(p: TileProblem, grads: dict[str, Tensor]) -> Grads:
    """Sum over splits and over the query heads that share a key head; back to each input's shape."""
    group = p.q.shape[1] // p.k.shape[1]
    d_k, d_v = (grads[name].sum(0) if grads[name].shape[0] > 1 else grads[name][0] for name in ("d_k", "d_v"))
    if group > 1:
        d_k, d_v = (x.unflatten(1, (-1, group)).sum(2) for x in (d_k, d_v))
    found: Grads = [_cut(grads["d_q"], p.q.shape[-1]), _cut(d_k, p.k.shape[-1]), _cut(d_v, p.v.shape[-1])]
    for name in ("d_cq", "d_ck", "d_rate_q", "d_rate_k"):
        grad = grads.get(name)
        if grad is not None and name in ("d_ck", "d_rate_k"):
            grad = grad.sum(0)
        found.append(grad if grad is None or "rate" not in name else grad.float())
    if p.probe_q is None:
        return [*found, None, None, None]
    width = p.probe_q.shape[-1]
    found += [_cut(grads["d_probe_q"], width), _cut(grads["d_probe_k"].sum(0), width)]
    return [*found, grads["d_path_rate"].sum((0, 1)).float()]
