"""From a `Problem` to launches: which kernel, on which grid, with which arguments and tile.

A `Launch` is data. `run` starts it; the ahead-of-time compile test reads the same arguments to build
the kernel for devices that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from . import kernels_backward, kernels_forward, kernels_key, prune
from .inputs import split_coordinate
from .tiles import Tile, tile_for

#: bytes the path backward may spend on row sums at key-block borders; more queries come in chunks
CARRY_BYTES = 256 * 2**20
#: chunks of queries are multiples of this, which every tile divides
CHUNK_ROWS = 128
#: key blocks a path scan takes between two looks at whether it may stop
STRIDE = 4


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call, flattened: see inputs.py for the shapes. window 0 is none, tau < 0 no pruning."""

    q: Tensor
    k: Tensor
    v: Tensor
    rate_q: Tensor | None
    rate_k: Tensor | None
    c_q: Tensor | None
    c_k: Tensor | None
    probe_q: Tensor | None
    probe_k: Tensor | None
    path_rate: Tensor | None
    documents: Tensor | None
    padding: Tensor | None
    causal: bool
    window: int
    scale: float
    tau: float
    bounded: bool

    @property
    def arch(self) -> int:
        """Compute capability times ten; what is not a GPU is treated as the smallest supported."""
        if self.q.device.type != "cuda":
            return 80
        major, minor = torch.cuda.get_device_capability(self.q.device)
        return 10 * major + minor

    @property
    def has_path(self) -> bool:
        return self.probe_q is not None

    @property
    def terms(self) -> int:
        return 0 if self.c_q is None else self.c_q.shape[2]

    def tile(self, kernel: str, arch: int) -> Tile:
        width = max(_padded(self.q.shape[-1]), _padded(self.v.shape[-1]))
        return tile_for(kernel, width, self.q.element_size(), self.terms > 0, self.has_path, arch)


@dataclass(frozen=True, eq=False)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tile: Tile = field(default_factory=lambda: Tile(64, 64))

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **{name: self.arguments[name] for name in self.kernel.arg_names},
            **self.tile.options(),
            enable_fp_fusion=True,  # stated, because Triton's default is about to change
        )


def _padded(size: int) -> int:
    """Features are padded to a power of two, at least the 16 a matrix unit takes."""
    return max(16, triton.next_power_of_2(size))


def _part(size: int, tile: Tile) -> int:
    """Features of an accumulator that one of a tile's parts owns."""
    return max(16, _padded(size) // tile.parts)


def _parts(size: int, tile: Tile) -> int:
    """Programs that share a block of rows: as many as have a feature of their own."""
    return triton.cdiv(size, _part(size, tile))


def _dot_precision(dtype: torch.dtype) -> str:
    """float32 is exact unless torch was told that TF32 will do."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" or dtype != torch.float32 else "tf32"


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": tensor.stride(i) for i, axis in enumerate("bht")}


def _common(problem: Problem, spare: Tensor) -> dict[str, Any]:
    """What every attention kernel is given. `spare` stands in for pointers that are never read."""
    p = problem
    slope = p.c_q is not None and p.c_k is not None
    return {
        "Q": p.q,
        "K": p.k,
        "V": p.v,
        "RATE_Q": spare if p.rate_q is None else p.rate_q,
        "RATE_K": spare if p.rate_k is None else p.rate_k,
        "CQ": split_coordinate(p.c_q) if slope and p.c_q is not None else spare,
        "CK": split_coordinate(p.c_k) if slope and p.c_k is not None else spare,
        "PROBE_Q": spare if p.probe_q is None else p.probe_q,
        "PROBE_K": spare if p.probe_k is None else p.probe_k,
        "PATH_RATE": spare if p.path_rate is None else p.path_rate,
        "DOCS": spare if p.documents is None else p.documents,
        "PADDING": spare if p.padding is None else p.padding,
        **_strides("q", p.q),
        **_strides("k", p.k),
        **_strides("v", p.v),
        "H": p.q.shape[1],
        "HKV": p.k.shape[1],
        "HP": 1 if p.probe_q is None else p.probe_q.shape[1],
        "TQ": p.q.shape[2],
        "TK": p.k.shape[2],
        "window": p.window,
        "scale": p.scale,
        "path_scale": 1.0 if p.probe_q is None else 1.0 / p.probe_q.shape[-1],
        "CAUSAL": p.causal,
        "WINDOW": p.window > 0,
        "HAS_DOCS": p.documents is not None,
        "HAS_PADDING": p.padding is not None,
        "R": p.terms,
        "HAS_RATE_Q": p.rate_q is not None,
        "HAS_RATE_K": p.rate_k is not None,
        "SPLIT": int(p.c_q is not None and p.c_q.dtype == torch.float64),
        "HAS_PATH": p.has_path,
        "BOUNDED_LINK": p.bounded,
        "D": p.q.shape[-1],
        "BLOCK_D": _padded(p.q.shape[-1]),
        "DV": p.v.shape[-1],
        "BLOCK_DV": _padded(p.v.shape[-1]),
        "P": 1 if p.probe_q is None else p.probe_q.shape[-1],
        "BLOCK_P": 16 if p.probe_q is None else _padded(p.probe_q.shape[-1]),
        "PRECISION": _dot_precision(p.q.dtype),
        # Probe scores are summed over thousands of tokens: three TF32 products keep float32's accuracy.
        "PATH_PRECISION": "tf32x3" if p.probe_q is not None and p.probe_q.dtype == torch.float32 else "ieee",
    }


def first_keys(problem: Problem) -> Tensor | None:
    """For each query (B, H, Tq) int32 the first key worth visiting, or None when that is simply 0."""
    p = problem
    if not p.causal:
        return None
    batch, heads, rows = p.q.shape[:3]
    first = None
    if p.documents is not None:
        own = p.documents[:, None, p.k.shape[2] - rows :]
        first = own.expand(batch, heads, rows).contiguous()
    if p.tau >= 0 and p.c_q is not None and p.c_k is not None:
        slope = prune.first_key_of_slope(
            p.q, p.k, p.rate_q, p.rate_k, p.c_q, p.c_k, p.path_rate, p.padding, p.scale, p.tau, prune.PATCH
        )
        first = slope if first is None else torch.maximum(first, slope)
    return first


def plan_forward(
    problem: Problem, out: Tensor, lse: Tensor, first: Tensor | None, stop: Tensor | None, arch: int
) -> Launch:
    """`stop` receives the first key each query reached, when a path scan may stop early."""
    p, tile = problem, problem.tile("forward", arch)
    early = stop is not None
    norm = p.k.float().norm(dim=-1).amax(-1).contiguous() if early else lse
    arguments = {
        **_common(p, lse),
        "OUT": out,
        "LSE": lse,
        "FIRST": lse if first is None else first,
        "STOP": lse if stop is None else stop,
        "KEY_NORM": norm,
        "tau": p.tau,
        "HAS_FIRST": first is not None,
        "EARLY_STOP": early,
        "BM": tile.queries,
        "BN": tile.keys,
        "CHUNK": tile.chunk,
        "HOIST": tile.hoist,
        "PART_DV": _part(p.v.shape[-1], tile),
        "STRIDE": STRIDE,
    }
    blocks = triton.cdiv(p.q.shape[2], tile.queries)
    grid = (blocks, p.q.shape[0] * p.q.shape[1], _parts(p.v.shape[-1], tile))
    return Launch(kernels_forward.forward_kernel, grid, arguments, tile)


def plan_delta(out: Tensor, dout: Tensor, delta: Tensor) -> Launch:
    batch, heads, rows, width = out.shape
    arguments = {
        "OUT": out,
        "DOUT": dout,
        "DELTA": delta,
        **{f"stride_{axis}": dout.stride(i) for i, axis in enumerate("bht")},
        "H": heads,
        "TQ": rows,
        "DV": width,
        "BLOCK_DV": _padded(width),
        "BM": 64,
    }
    return Launch(kernels_backward.delta_kernel, (triton.cdiv(rows, 64), batch * heads), arguments)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where the backward kernels write; key-side bias gradients are by query head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_rate_q: Tensor | None
    d_rate_k: Tensor | None
    d_c_q: Tensor | None
    d_c_k: Tensor | None
    d_probe_q: Tensor | None
    d_probe_k: Tensor | None
    d_path_rate: Tensor | None


def chunks(problem: Problem, arch: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the parts in which the backward takes the queries: one, unless a path is long."""
    p, rows = problem, problem.q.shape[2]
    step = rows
    if p.has_path:
        row_bytes = 8 * p.q.shape[0] * p.q.shape[1] * _borders(p, arch)
        step = max(1, CARRY_BYTES // (row_bytes * CHUNK_ROWS)) * CHUNK_ROWS
    for row in range(0, rows, max(step, 1)):
        yield row, min(step, rows - row)


def _borders(problem: Problem, arch: int) -> int:
    """Key blocks of the query kernel, up to a whole number of the key kernel's."""
    query, key = problem.tile("query", arch).keys, problem.tile("key", arch).keys
    return triton.cdiv(problem.k.shape[2], key) * (key // query)


def plan_backward(
    problem: Problem,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    first: Tensor | None,
    gradients: Gradients,
    arch: int,
) -> Iterator[Launch]:
    """carry (path only), query and key kernels, for each chunk of queries in turn."""
    p, g = problem, gradients
    batch, heads = p.q.shape[:2]
    query, key = p.tile("query", arch), p.tile("key", arch)
    assert key.split or key.parts == 1, "parts of dk and of dv need launches of their own"
    blocks = triton.cdiv(p.k.shape[2], key.keys)
    common = {**_common(p, lse), "DOUT": dout, **_strides("o", dout), "LSE": lse, "DELTA": delta}
    last = None if first is None else prune.last_query_of_block(first, p.k.shape[2], key.keys)
    borders = _borders(p, arch) if p.has_path else 0
    common |= {"borders": borders, "RATIO": key.keys // query.keys if p.has_path else 1}
    for row, count in chunks(p, arch):
        carry = left = lse
        if p.has_path:
            # Far below any logit where no scan comes, so that such a pair weighs nothing.
            carry = lse.new_full((batch, heads, borders, count), -1e30)
            left = lse.new_zeros((batch, heads, borders, count))
        shared = {**common, "CARRY": carry, "LEFT": left, "row_begin": row, "row_count": count}
        grid = (triton.cdiv(count, query.queries), batch * heads)
        if p.has_path:
            yield _plan_carry(shared, lse if first is None else first, first is not None, grid, query)
        arguments = {
            **shared,
            "FIRST": lse if first is None else first,
            "HAS_FIRST": first is not None,
            "DQ": g.dq,
            "D_RATE": lse if g.d_rate_q is None else g.d_rate_q,
            "D_C": lse if g.d_c_q is None else g.d_c_q,
            "D_PROBE": lse if g.d_probe_q is None else g.d_probe_q,
            "D_PATH_RATE": lse if g.d_path_rate is None else g.d_path_rate,
            "NEED_RATE": g.d_rate_q is not None,
            "NEED_C": g.d_c_q is not None,
            "BM": query.queries,
            "BN": query.keys,
            "CHUNK": query.chunk,
            "HOIST": query.hoist,
            "PART_D": _part(p.q.shape[-1], query),
        }
        yield Launch(kernels_backward.query_kernel, (*grid, _parts(p.q.shape[-1], query)), arguments, query)
        arguments = {
            **shared,
            "LAST": lse if last is None else last,
            "HAS_LAST": last is not None,
            "ADD_BIAS": row > 0,
            "DK": g.dk,
            "DV_OUT": g.dv,
            "D_RATE": lse if g.d_rate_k is None else g.d_rate_k,
            "D_C": lse if g.d_c_k is None else g.d_c_k,
            "D_PROBE": lse if g.d_probe_k is None else g.d_probe_k,
            "NEED_RATE": g.d_rate_k is not None,
            "NEED_C": g.d_c_k is not None,
            "BM": key.queries,
            "BN": key.keys,
            "CHUNK": key.chunk,
            "HOIST": key.hoist,
            "PART_D": _part(p.q.shape[-1], key),
            "PART_DV": _part(p.v.shape[-1], key),
        }
        grid = (blocks, batch * p.k.shape[1])
        for member in range(heads // p.k.shape[1]):
            for dk, dv in ((True, False), (False, True)) if key.split else ((True, True),):
                part = {"member": member, "ADD": row > 0 or member > 0, "WANT_DK": dk, "WANT_DV": dv}
                width = p.q.shape[-1] if dk else p.v.shape[-1]
                yield Launch(kernels_key.key_kernel, (*grid, _parts(width, key)), {**arguments, **part}, key)


def _plan_carry(
    shared: dict[str, Any], first: Tensor, has_first: bool, grid: tuple[int, ...], tile: Tile
) -> Launch:
    names = (
        "PROBE_Q PROBE_K CARRY H HP TQ TK row_begin row_count borders window path_scale RATIO "
        "WINDOW BOUNDED_LINK P BLOCK_P PATH_PRECISION"
    )
    arguments = {name: shared[name] for name in names.split()}
    arguments |= {"FIRST": first, "HAS_FIRST": has_first, "BM": tile.queries, "BN": tile.keys}
    return Launch(kernels_backward.carry_kernel, grid, arguments, tile)
