"""`grape::attention` by the compiled CPU kernel: makes the arrays, checks them, and calls tiles.cpp.

Letters are those of `Problem` in tiles.cpp: B batch, H query heads, KV key heads, HP probe heads, Tq queries,
Tk keys, D and Dv features, R slope terms, P probe features, S tables over L distances; `tiles` of
keys, `splits` of the queries, `ranges` of the slope terms (R where tiles may be pruned, else 0).
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ...bias import Bias
from .. import pruning
from ..masks import Masks
from ..problem import AttentionProblem, run, why_not
from ..pruning import OFF, Prune
from . import build

Arrays = dict[str, Tensor | None]
TILE = 64  # BQ and BK of tiles.cpp
F, D, INT = torch.float32, torch.float64, torch.int64
#: dtype and shape of every array, in the order of the struct; None, a null pointer, for what a call has not
ARRAYS = {
    name: (dtype, axes.split())
    for name, dtype, axes in (
        ("q", F, "B H Tq D"), ("k", F, "B KV Tk D"), ("v", F, "B KV Tk Dv"),
        ("c_q", D, "R B H Tq"), ("c_k", D, "R B H Tk"), ("rate_q", F, "R B H Tq"), ("rate_k", F, "R B H Tk"),
        ("probe_q", F, "B HP Tq P"), ("probe_k", F, "B HP Tk P"), ("path_rate", F, "H"),
        ("table", F, "H S L"), ("mix", F, "B H Tq S"), ("place_q", INT, "B Tq"), ("place_k", INT, "B Tk"),
        ("documents", INT, "B Tk"), ("key_padding", torch.bool, "B Tk"),
        ("out", F, "B H Tq Dv"), ("lse", F, "B H Tq"), ("norms", F, "B H Tq 2"), ("work", INT, "B H 2"),
        ("key_norm", D, "B KV tiles"), ("slope_range", D, "ranges B H tiles 4"),
        ("d_out", F, "B H Tq Dv"), ("d_lse", F, "B H Tq"),
        ("d_q", F, "B H Tq D"), ("d_k", F, "splits B KV Tk D"), ("d_v", F, "splits B KV Tk Dv"),
        ("d_c_q", D, "R B H Tq"), ("d_c_k", D, "splits R B H Tk"),
        ("d_rate_q", D, "R B H Tq"), ("d_rate_k", D, "splits R B H Tk"),
        ("d_probe_q", F, "B H Tq P"), ("d_probe_k", F, "splits B H Tk P"), ("d_path_rate", D, "splits B H"),
        ("d_table", D, "splits B H S L"), ("d_mix", F, "B H Tq S"),
    )
}  # fmt: skip
INPUTS = tuple(ARRAYS)[:16]
RESULTS = ("out", "lse", "work", "norms", "key_norm", "slope_range")  # of the forward
STRIDED = ("c_q", "c_k", "rate_q", "rate_k")  # read with any strides
ADDED_TO = ("slope_range", "d_k", "d_v", "d_c_k", "d_rate_k", "d_probe_k", "d_path_rate", "d_table")
#: gradients that are made together when one of them is wanted; those of q, k and v always are
TOGETHER = (("c_q", "c_k"), ("rate_q", "rate_k"), ("probe_q", "probe_k", "path_rate"), ("table", "mix"))
NUMBERS = (
    "B", "H", "KV", "HP", "Tq", "Tk", "D", "Dv", "R", "P", "S", "L",
    "causal", "window", "sinks", "bounded", "threads", "splits", "first", "beyond",
)  # fmt: skip
#: `Problem` in tiles.cpp: numbers, strides, scale and tau, addresses
PROBLEM = struct.Struct(f"{len(NUMBERS)}q {4 * len(STRIDED)}q 2f {len(ARRAYS)}P")


def why_not_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if q.device.type != "cpu":
        return f"it computes on the CPU, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    return why_not(bias) or build.why_not()


def attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    out, lse, work = run(prepared(AttentionProblem.build(q, k, v, bias, masks, scale, prune)), "cpu")
    pruning.note(work)
    return out.to(v.dtype), lse


def prepared(p: AttentionProblem) -> AttentionProblem:
    """The problem as tiles.cpp reads it, made once for both passes: float32, contiguous, int64 ids."""
    for name in INPUTS:
        if (x := getattr(p, name)) is not None and name not in STRIDED:
            setattr(p, name, x.to(ARRAYS[name][0]).contiguous())
    p.key_bound = None
    return p


def allocate(p: AttentionProblem) -> list[Tensor]:
    return [_new(p, name, _sizes(p)) for name in RESULTS[3:]]


def forward(p: AttentionProblem, results: list[Tensor]) -> None:
    results[2].zero_()
    _call("grape_forward", p, _sizes(p), dict(zip(RESULTS, results, strict=True)))


def backward(
    p: AttentionProblem, wanted: list[str], d_out: Tensor, d_lse: Tensor | None, results: list[Tensor]
) -> dict[str, Tensor]:
    sizes = _sizes(p)
    given: Arrays = dict(zip((*RESULTS, "d_out"), (*results, d_out.contiguous()), strict=True))
    given["d_lse"] = None if d_lse is None else d_lse.contiguous()
    _check(given, sizes)
    threads, jobs = torch.get_num_threads(), sizes["B"] * sizes["KV"]
    if threads > 1:
        sizes["splits"] = max(1, min(-(-sizes["Tq"] // TILE), -(-2 * threads // jobs)))
    names = ["q", "k", "v", *(x for group in TOGETHER if not set(group).isdisjoint(wanted) for x in group)]
    grads = {name: _new(p, "d_" + name, sizes) for name in names}
    _call("grape_backward", p, sizes, given | {"d_" + name: x for name, x in grads.items()})
    return {name: _collected(name, getattr(p, name), grads[name]) for name in wanted}


def _collected(name: str, field: Tensor, grad: Tensor) -> Tensor:
    """Sums over splits and over the heads that share a probe, in the dtype of the field."""
    if ARRAYS["d_" + name][1][0] == "splits":
        grad = grad.sum(0) if grad.shape[0] > 1 else grad[0]
    if name in ("path_rate", "table"):
        grad = grad.sum(0)
    if name.startswith("probe") and grad.shape[1] != field.shape[1]:
        grad = grad.unflatten(1, (field.shape[1], -1)).sum(2)
    return grad.to(field.dtype)


def _sizes(p: AttentionProblem) -> dict[str, int]:
    (batch, heads, queries, width), (_, kv_heads, keys, _) = p.q.shape, p.k.shape
    _, probes, _, features = (0, 0, 0, 0) if p.probe_q is None else p.probe_q.shape
    terms = 0 if p.c_q is None else p.c_q.shape[0]
    _, tables, distances = (0, 0, 0) if p.table is None else p.table.shape
    return {
        "B": batch, "H": heads, "KV": kv_heads, "HP": probes, "Tq": queries, "Tk": keys, "D": width,
        "Dv": p.v.shape[-1], "R": terms, "P": features, "S": tables, "L": distances,
        "tiles": -(-keys // TILE), "splits": 1, "ranges": 0 if p.prune == OFF else terms, "2": 2, "4": 4,
    }  # fmt: skip


def _new(p: AttentionProblem, name: str, sizes: dict[str, int]) -> Tensor:
    dtype, axes = ARRAYS[name]
    make = p.q.new_zeros if name in ADDED_TO else p.q.new_empty
    return make([sizes[axis] for axis in axes], dtype=dtype)


def _call(function: str, p: AttentionProblem, sizes: dict[str, int], arrays: Arrays) -> None:
    inputs: Arrays = {name: getattr(p, name) for name in INPUTS}
    _check(inputs, sizes)
    numbers = sizes | {name: getattr(p, name) for name in ("causal", "sinks", "bounded", "first", "beyond")}
    numbers |= {"window": min(p.window, p.q.shape[2] + p.k.shape[2]), "threads": torch.get_num_threads()}
    strides = [(0,) * 4 if x is None else x.stride() for x in map(inputs.get, STRIDED)]
    scale = ctypes.c_float(p.scale).value  # infinite beyond float32, for which `pack` raises
    tau = pruning.tau(p).item() if pruning.worthwhile(p, TILE) else OFF
    addresses = [0 if x is None else x.data_ptr() for x in map((inputs | arrays).get, ARRAYS)]
    found = PROBLEM.pack(*map(numbers.get, NUMBERS), *sum(strides, ()), scale, tau, *addresses)
    build.run(function, found)


def _check(arrays: Arrays, sizes: dict[str, int]) -> None:
    for name, x in arrays.items():
        dtype, axes = ARRAYS[name]
        if x is not None:
            build.check_array(name, x, dtype, tuple([sizes[axis] for axis in axes]), name not in STRIDED)
