"""`grape::attention` by the compiled CPU kernel: makes the arrays, checks them, and calls tiles.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ...bias import Bias
from .. import pruning
from ..masks import Masks
from ..problem import AttentionProblem, run, why_not
from ..pruning import OFF, Prune
from . import build
from .build import TILE

Arrays = dict[str, Tensor | None]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
STRIDED = ("c_q", "c_k", "rate_q", "rate_k")  # read with any strides


def available() -> bool:
    """Whether the kernel could be built. torch.compile asks once, while it traces."""
    return build.available()


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the package.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if q.device.type != "cpu":
        return f"it computes on the CPU, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    return why_not(bias) or (None if available() else build.why_not() or "it is not built")


def attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    out, lse, work = run(prepared(AttentionProblem.build(q, k, v, bias, masks, scale, prune)), "cpu")
    pruning.note(work)
    return out.to(v.dtype), lse


def prepared(p: AttentionProblem) -> AttentionProblem:
    """The problem as tiles.cpp reads it, made once for both passes: float32, contiguous, int64 ids."""
    p.q, p.k, p.v = p.q.float().contiguous(), p.k.float().contiguous(), p.v.float().contiguous()
    if p.probe_q is not None and p.probe_k is not None:
        p.probe_q, p.probe_k = p.probe_q.contiguous(), p.probe_k.contiguous()
    if p.documents is not None:
        p.documents = p.documents.long().contiguous()
    if p.key_padding is not None:
        p.key_padding = p.key_padding.contiguous()
    p.key_bound = None
    return p


def allocate(p: AttentionProblem) -> list[Tensor]:
    """norms, key_norm, slope_range (empty without pruning)."""
    layout = _results(p)
    norms, key_norm = (p.q.new_empty(layout[x][1], dtype=layout[x][0]) for x in ("norms", "key_norm"))
    return [norms, key_norm, p.q.new_zeros(layout["slope_range"][1], dtype=torch.float64)]


def forward(p: AttentionProblem) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    saved = allocate(p)
    out, lse = p.q.new_empty((*p.q.shape[:3], p.v.shape[-1])), p.q.new_empty(p.q.shape[:3])
    work = p.q.new_zeros((*p.q.shape[:2], 2), dtype=torch.int64)
    if p.empty:
        return out.zero_(), lse.fill_(float("-inf")), work, [x.zero_() for x in saved]
    _call("grape_forward", p, {"out": out, "lse": lse, "work": work, **_named(saved)}, 1)
    return out, lse, work, saved


def backward(
    p: AttentionProblem,
    wanted: list[str],
    d_out: Tensor,
    d_lse: Tensor | None,
    results: list[Tensor],
) -> dict[str, Tensor]:
    out, lse, work, *saved = results
    if p.empty:
        return {name: torch.zeros_like(getattr(p, name)) for name in wanted}
    given: Arrays = {"out": out, "lse": lse, "work": work, **_named(saved), "d_out": d_out.contiguous()}
    given["d_lse"] = None if d_lse is None else d_lse.contiguous()
    _check(given, _results(p))
    blocks, jobs = -(-p.q.shape[2] // TILE), p.q.shape[0] * p.k.shape[1]
    threads = torch.get_num_threads()
    splits = 1 if threads == 1 else max(1, min(blocks, -(-2 * threads // jobs)))
    grads = _gradients(p, wanted, splits)
    _call("grape_backward", p, {**given, **grads}, splits)
    return {name: _collected(name, getattr(p, name), grads["d_" + name]) for name in wanted}


def _named(saved: list[Tensor]) -> Arrays:
    norms, key_norm, ranges = saved
    return {"norms": norms, "key_norm": key_norm, "slope_range": ranges}


def _gradients(p: AttentionProblem, wanted: list[str], splits: int) -> dict[str, Tensor]:
    """Arrays the backward fills (queries) or adds to (keys), the latter once for each split."""
    grads = {
        "d_q": torch.empty_like(p.q),
        "d_k": p.k.new_zeros((splits, *p.k.shape)),
        "d_v": p.v.new_zeros((splits, *p.v.shape)),
    }
    if p.c_q is not None and p.c_k is not None:
        for name in ("c", "rate"):
            if f"{name}_q" in wanted or f"{name}_k" in wanted:
                grads[f"d_{name}_q"] = p.c_q.new_empty(p.c_q.shape)
                grads[f"d_{name}_k"] = p.c_k.new_zeros((splits, *p.c_k.shape))
    if p.probe_q is not None and not {"probe_q", "probe_k", "path_rate"}.isdisjoint(wanted):
        (batch, heads, queries), keys, width = p.q.shape[:3], p.k.shape[2], p.probe_q.shape[-1]
        grads["d_probe_q"] = p.q.new_empty((batch, heads, queries, width))
        grads["d_probe_k"] = p.q.new_zeros((splits, batch, heads, keys, width))
        grads["d_path_rate"] = p.q.new_zeros((splits, batch, heads), dtype=torch.float64)
    return grads


def _collected(name: str, field: Tensor, grad: Tensor) -> Tensor:
    """Sums over splits and over the heads that share a probe, in the dtype of the field."""
    if not name.endswith("q"):
        grad = grad.sum(0) if grad.shape[0] > 1 else grad[0]
    if name == "path_rate":
        grad = grad.sum(0)
    if name.startswith("probe") and grad.shape[1] != field.shape[1]:
        grad = grad.unflatten(1, (field.shape[1], -1)).sum(2)
    return grad.to(field.dtype)


def _call(function: str, p: AttentionProblem, arrays: Arrays, splits: int) -> None:
    (batch, heads, queries, width), (kv_heads, keys) = p.q.shape, p.k.shape[1:3]
    terms = 0 if p.c_q is None else p.c_q.shape[0]
    probe_heads, features = (0, 0) if p.probe_q is None else (p.probe_q.shape[1], p.probe_q.shape[3])
    tau = pruning.tau(p).item() if pruning.worthwhile(p, TILE) else OFF
    sides = {"c_q": p.c_q, "c_k": p.c_k, "rate_q": p.rate_q, "rate_k": p.rate_k}
    inputs: Arrays = {"q": p.q, "k": p.k, "v": p.v, **sides, "probe_q": p.probe_q, "probe_k": p.probe_k}
    inputs |= {"path_rate": p.path_rate, "documents": p.documents, "key_padding": p.key_padding}
    _check(inputs, _inputs(p))
    problem = build.Problem(
        batch, heads, kv_heads, probe_heads, queries, keys, width, p.v.shape[-1], terms, features,
        p.causal, min(p.window, queries + keys), p.sinks, p.bounded, torch.get_num_threads(), splits,
        *((0,) * 4 if x is None else x.stride() for x in sides.values()), p.scale, tau,
    )  # fmt: skip
    for name, x in (inputs | arrays).items():
        if x is not None:
            setattr(problem, name, x.data_ptr())
    build.run(function, problem)


def _inputs(p: AttentionProblem) -> Layout:
    """Dtype and shape of the arrays of a problem, as tiles.cpp indexes them."""
    f, d = torch.float32, torch.float64
    (batch, heads, queries, _), (_, kv_heads, keys, width) = p.q.shape, p.k.shape
    layout: Layout = {"q": (f, (batch, heads, queries, width)), "k": (f, (batch, kv_heads, keys, width))}
    layout["v"] = (f, (batch, kv_heads, keys, p.v.shape[-1]))
    layout["documents"], layout["key_padding"] = (torch.int64, (batch, keys)), (torch.bool, (batch, keys))
    if p.c_q is not None:
        of_rows, of_keys = (p.c_q.shape[0], batch, heads, queries), (p.c_q.shape[0], batch, heads, keys)
        layout |= {"c_q": (d, of_rows), "c_k": (d, of_keys), "rate_q": (f, of_rows), "rate_k": (f, of_keys)}
    if p.probe_q is not None:
        _, probes, _, features = p.probe_q.shape
        layout["path_rate"], layout["probe_q"] = (f, (heads,)), (f, (batch, probes, queries, features))
        layout["probe_k"] = (f, (batch, probes, keys, features))
    return layout


def _results(p: AttentionProblem) -> Layout:
    """The same of what the forward leaves to the backward, and of the gradients that come back."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = p.q.shape, p.k.shape
    tiles, terms = -(-keys // TILE), 0 if p.c_k is None or p.prune == OFF else p.c_k.shape[0]
    f, d, rows = torch.float32, torch.float64, (batch, heads, queries)
    out = (f, (*rows, p.v.shape[-1]))
    return {
        "out": out, "lse": (f, rows), "work": (torch.int64, (batch, heads, 2)), "norms": (f, (*rows, 2)),
        "key_norm": (d, (batch, kv_heads, tiles)), "slope_range": (d, (terms, batch, heads, tiles, 4)),
        "d_out": out, "d_lse": (f, rows),
    }  # fmt: skip


def _check(arrays: Arrays, layout: Layout) -> None:
    """The kernel reads addresses: whatever is not exactly as it expects must not reach it."""
    for name, x in arrays.items():
        if x is None:
            continue
        dtype, shape = layout[name]
        strided = name in STRIDED
        if x.dtype != dtype or x.shape != shape or not x.is_cpu or not (strided or x.is_contiguous()):
            raise ValueError(
                f"the CPU attention kernel reads {name} as {'' if strided else 'contiguous '}{dtype} of shape "
                f"{shape}, got {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} on {x.device}"
            )
