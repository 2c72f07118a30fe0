"""`grape::attention` by the compiled CPU kernel: makes the arrays, checks them, and calls tiles.cpp."""

from __future__ import annotations

from dataclasses import replace

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
SIDES = {"c_q": "cq_stride", "c_k": "ck_stride", "rate_q": "rq_stride", "rate_k": "rk_stride"}


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
    names = ("q", "k", "v", "probe_q", "probe_k", "path_rate", "documents", "key_padding")
    given = {name: x for name in names if (x := getattr(p, name)) is not None}
    for name in ("q", "k", "v"):
        given[name] = given[name].float()
    if p.documents is not None:
        given["documents"] = p.documents.long()
    return replace(p, key_bound=None, **{name: x.contiguous() for name, x in given.items()})


def allocate(p: AttentionProblem) -> list[Tensor]:
    """norms (B,H,Tq,2), longest key (B,Hkv,tiles) and, for pruning, the ranges of c and rate_k by tile."""
    tiles = -(-p.k.shape[2] // TILE)
    terms = 0 if p.c_k is None or p.prune == OFF else p.c_k.shape[0]
    norms = p.q.new_empty((*p.q.shape[:3], 2))
    key_norm = p.q.new_empty((*p.k.shape[:2], tiles), dtype=torch.float64)
    return [norms, key_norm, p.q.new_empty((terms, *p.q.shape[:2], tiles, 4), dtype=torch.float64)]


def forward(p: AttentionProblem) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    saved = allocate(p)
    out = p.q.new_empty((*p.q.shape[:3], p.v.shape[-1]))
    lse, work = p.q.new_empty(p.q.shape[:3]), p.q.new_zeros((*p.q.shape[:2], 2), dtype=torch.int64)
    if p.empty:
        return out.zero_(), lse.fill_(float("-inf")), work, saved
    results: Arrays = {"out": out, "lse": lse, "work": work, **_named(saved)}
    _call("grape_forward", p, results, 1)
    return out, lse, work, saved


def backward(
    p: AttentionProblem,
    wanted: list[str],
    d_out: Tensor,
    d_lse: Tensor | None,
    results: list[Tensor],
) -> dict[str, Tensor]:
    out, _, work, *saved = results
    if p.empty:
        return {name: torch.zeros_like(getattr(p, name)) for name in wanted}
    blocks, jobs = -(-p.q.shape[2] // TILE), p.q.shape[0] * p.k.shape[1]
    threads = torch.get_num_threads()
    splits = 1 if threads == 1 else max(1, min(blocks, -(-2 * threads // jobs)))
    grads = _gradients(p, wanted, splits)
    given: Arrays = {"out": out, "work": work, **_named(saved), "d_out": d_out.contiguous()}
    given["d_lse"] = None if d_lse is None else d_lse.contiguous()
    _call("grape_backward", p, {**given, **grads}, splits)
    return _collected(p, wanted, grads)


def _named(saved: list[Tensor]) -> Arrays:
    norms, key_norm, ranges = saved
    return {"norms": norms, "key_norm": key_norm, "slope_range": ranges if ranges.numel() else None}


def _gradients(p: AttentionProblem, wanted: list[str], splits: int) -> dict[str, Tensor]:
    """Arrays the backward fills (queries) or adds to (keys), the latter once for each split."""
    batch, heads, keys = p.q.shape[0], p.q.shape[1], p.k.shape[2]
    grads = {
        "d_q": torch.empty_like(p.q),
        "d_k": p.k.new_zeros((splits, *p.k.shape)),
        "d_v": p.v.new_zeros((splits, *p.v.shape)),
    }
    if p.c_q is not None and p.c_k is not None:
        for name, needed in (("c", {"c_q", "c_k"}), ("rate_", {"rate_q", "rate_k"})):
            if needed & set(wanted):
                grads[f"d_{name}q"] = p.c_q.new_empty(p.c_q.shape)
                grads[f"d_{name}k"] = p.c_k.new_zeros((splits, *p.c_k.shape))
    if p.probe_q is not None and {"probe_q", "probe_k", "path_rate"} & set(wanted):
        width = p.probe_q.shape[-1]
        grads["d_probe_q"] = p.q.new_empty((*p.q.shape[:3], width))
        grads["d_probe_k"] = p.q.new_zeros((splits, batch, heads, keys, width))
        grads["d_path_rate"] = p.q.new_zeros((splits, batch, heads), dtype=torch.float64)
    return grads


def _collected(p: AttentionProblem, wanted: list[str], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over splits and over the heads that share a probe, in the dtype of each field."""
    found = {}
    for name in wanted:
        field: Tensor = getattr(p, name)
        grad = grads["d_" + name.replace("c_", "c")]
        if not name.endswith("_q") and name != "q":
            grad = grad.sum(0) if grad.shape[0] > 1 else grad[0]
        if name == "path_rate":
            grad = grad.sum(0)
        if name.startswith("probe") and grad.shape[1] != field.shape[1]:
            grad = grad.unflatten(1, (field.shape[1], -1)).sum(2)
        found[name] = grad.to(field.dtype)
    return found


def _call(function: str, p: AttentionProblem, results: Arrays, splits: int) -> None:
    (batch, heads, queries, width), (kv_heads, keys) = p.q.shape, p.k.shape[1:3]
    terms = 0 if p.c_q is None else p.c_q.shape[0]
    probe_heads, features = (0, 0) if p.probe_q is None else (p.probe_q.shape[1], p.probe_q.shape[3])
    tau = pruning.tau(p).item() if pruning.worthwhile(p, TILE) else OFF
    problem = build.Problem(
        B=batch, H=heads, KV=kv_heads, HP=probe_heads, Tq=queries, Tk=keys, D=width, Dv=p.v.shape[-1],
        R=terms, P=features, causal=p.causal, window=min(p.window, queries + keys), sinks=p.sinks,
        bounded=p.bounded, threads=torch.get_num_threads(), splits=splits, scale=p.scale, tau=tau,
    )  # fmt: skip
    arrays: Arrays = {name: getattr(p, name) for name in ("q", "k", "v", "probe_q", "probe_k", "path_rate")}
    arrays |= {name: getattr(p, name) for name in SIDES}
    arrays |= {"documents": p.documents, "padding": p.key_padding, **results}
    shapes = _shapes(problem)
    for name, x in arrays.items():
        if x is not None:
            _check(name, x, *shapes[name], strided=name in SIDES)
            setattr(problem, name, x.data_ptr())
            if name in SIDES:
                setattr(problem, SIDES[name], x.stride())
    build.run(function, problem)


def _shapes(p: build.Problem) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every array of `Problem`, as tiles.cpp indexes them."""
    f, d = torch.float32, torch.float64
    rows, keys, tiles = (p.B, p.H, p.Tq), (p.B, p.H, p.Tk), -(-p.Tk // TILE)
    q, k, v = (*rows, p.D), (p.B, p.KV, p.Tk, p.D), (p.B, p.KV, p.Tk, p.Dv)
    of_rows, of_keys, by_split = (p.R, *rows), (p.R, *keys), (p.splits, p.R, *keys)
    return {
        "q": (f, q), "k": (f, k), "v": (f, v),
        "c_q": (d, of_rows), "c_k": (d, of_keys), "rate_q": (f, of_rows), "rate_k": (f, of_keys),
        "probe_q": (f, (p.B, p.HP, p.Tq, p.P)), "probe_k": (f, (p.B, p.HP, p.Tk, p.P)),
        "path_rate": (f, (p.H,)),
        "documents": (torch.int64, (p.B, p.Tk)), "padding": (torch.bool, (p.B, p.Tk)),
        "out": (f, (*rows, p.Dv)), "lse": (f, rows), "norms": (f, (*rows, 2)),
        "work": (torch.int64, (p.B, p.H, 2)), "key_norm": (d, (p.B, p.KV, tiles)),
        "slope_range": (d, (p.R, p.B, p.H, tiles, 4)),
        "d_out": (f, (*rows, p.Dv)), "d_lse": (f, rows),
        "d_q": (f, q), "d_k": (f, (p.splits, *k)), "d_v": (f, (p.splits, *v)),
        "d_cq": (d, of_rows), "d_ck": (d, by_split), "d_rate_q": (d, of_rows), "d_rate_k": (d, by_split),
        "d_probe_q": (f, (*rows, p.P)), "d_probe_k": (f, (p.splits, *keys, p.P)),
        "d_path_rate": (d, (p.splits, p.B, p.H)),
    }  # fmt: skip


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> None:
    """The kernel reads addresses: whatever is not exactly as it expects must not reach it."""
    if x.dtype != dtype or x.shape != shape or x.device.type != "cpu" or not (strided or x.is_contiguous()):
        layout = "" if strided else "contiguous "
        raise ValueError(
            f"the CPU attention kernel reads {name} as {layout}{dtype} of shape {shape}, got {x.dtype} of "
            f"shape {tuple(x.shape)} and strides {x.stride()} on {x.device}"
        )
